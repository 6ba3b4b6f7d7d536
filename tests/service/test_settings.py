"""The sidecar's configuration: what people may write, and what they are told. `test_serve.py` has the flags."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvstore.block.errors import BadInput
from kvstore.service.settings import Settings, read_settings, settings_of
from workbench import one_line
from wrong_values import every_setting, wrong_values

WHOLE = {
    "tenants.NAME": {"socket": "s"},
    "network": {"listen": "127.0.0.1:1", "token_file": "t"},
    "remote": {"url": "u"},
}
"""What a section needs besides, so that only the wrong value is wrong."""
WRONG = [(section, key, value) for section, key, kind, _ in every_setting() for value in wrong_values(kind)]


def settings_with(section: str, **given: Any) -> Settings:
    table: dict[str, Any] = {**WHOLE.get(section, {}), **given}
    top, _, name = section.partition(".")
    return settings_of({top: {name: table} if name else table})


def test_a_value_that_a_setting_does_not_allow_is_one_line_under_its_full_name() -> None:
    """Each setting refuses what its own type and bounds exclude."""
    assert len(WRONG) > 500 and {(section, key) for section, key, _ in WRONG} == {it[:2] for it in every_setting()}
    for section, key, value in WRONG:
        with pytest.raises(BadInput) as caught:
            settings_with(section, **{key: value})
        assert one_line(caught.value, f"{section}.{key}={value!r}"[:300]), (section, key, value)
        assert re.search(r"give|write|allowed", str(caught.value)), caught.value


def test_the_defaults_of_all_sections_are_what_they_allow() -> None:
    for section, key, _, default in every_setting():
        if default is not None:
            assert settings_with(section, **{key: default})


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (b'[store]\ndata = "\xff"\n', ("not UTF-8 at byte 16",)),
        ("[store]\ndrm = 1\n", ("store.drm is not a setting", "did you mean store.dram?")),
        ("store = 1\n", ("store=1", "[store]")),
        ("[door]\nlimits = 1\n", ("door.limits is not a setting",)),
        ("[tenants.a]\n", ("tenants.a.socket is missing",)),
        ("[tenants.a]\nsocket = 's'\n[tenants.b]\nsocket = 's'\n", ("tenants.b.socket=s is tenants.a.socket too",)),
        ("[admin]\nsocket = 's'\n[tenants.a]\nsocket = 's'\n", ("admin.socket=s is tenants.a.socket too", "its own")),
        ("[store]\ndram = 'AUTO'\n", ("store.dram='AUTO'", "or auto")),
        ("[store]\nnvme = 'none'\n", ("store.nvme='none'", "or auto", "or off")),
        ("[store]\nextent = 'auto'\n", ("store.extent='auto'",)),
        ("[store]\nnvme = 'off'\nnvme_writes = 1.0\n", ("store.nvme_writes=1.0", "there is none", "give nvme a size")),
        ("[tenants]\nshare = 0.2\n", ("tenants.share=0.2 is a section", "socket, users, share")),
        ("tenants = 0.2\n", ("tenants=0.2", "write [tenants.NAME] for each")),
        ("[tenants.a]\nsocket = 'a'\nshare = 0.7\n[door]\nshare = 0.4\n", ("come to 1.1", "default 0.4, a 0.7")),
        (f"[door]\nsocket = '{'x' * 120}'\n", ("door.socket=xxx", "107 bytes")),
        (f"[tenants.a]\nsocket = '{'x' * 120}'\n", ("tenants.a.socket=xxx", "107 bytes")),
        ("[tenants.default]\nsocket = 's'\n", ("tenants.default", "door.socket")),
        ("[http]\nlisten = '127.0.0.1:\u00b2'\n", ("http.listen=", "HOST:PORT")),
        ("[http]\nlisten = '127.0.0.1:65536'\n", ("http.listen='127.0.0.1:65536'", "65535")),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_full_name(text: str | bytes, fragments: tuple[str, ...]) -> None:
    with pytest.raises(BadInput) as caught:
        read_settings(text)
    assert one_line(caught.value, *fragments)


@pytest.mark.parametrize(
    "text",
    [
        f'"{"k" * 100_000}" = 1',
        f'[store]\n"{"k" * 100_000}" = 1',
        f'[store]\npolicy = "{"k" * 100_000}"',
        f'[store]\ndram = "{"9" * 100_000}"',
        f"[limits]\nleases = {'9' * 5000}",
        f"[limits]\nleases = {'[' * 5000}",
        f'[tenants]\n"{"k" * 100_000}" = 1',
    ],
)
def test_what_is_wrong_is_told_in_a_line_that_can_be_read(text: str) -> None:
    """However long it is, and however deep."""
    with pytest.raises(BadInput) as caught:
        read_settings(text)
    assert one_line(caught.value) and len(str(caught.value)) < 1200


def test_what_is_no_toml_is_told_by_the_name_of_its_file() -> None:
    with pytest.raises(BadInput) as caught:
        read_settings("[store\n", name="some/kv.toml")
    assert one_line(caught.value, "some/kv.toml is not TOML: ", "line 1")
    with pytest.raises(BadInput) as caught:
        read_settings(b"\xff", name="some/kv.toml")
    assert one_line(caught.value, "some/kv.toml is not UTF-8 at byte 0")


def test_nobody_may_be_let_in() -> None:
    """What shuts the default tenant's socket where only others are served."""
    assert read_settings("[door]\nusers = []\n").door.users == []


def test_the_file_of_the_token_may_lie_in_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = read_settings('[http]\nlisten = "127.0.0.1:9797"\ntoken_file = "~/token"\n')
    assert settings.http.token_file == "/home/somebody/token"
    assert read_settings('[http]\nlisten = "127.0.0.1:9797"\n').http.token_file is None
    with pytest.raises(BadInput, match=r"http\.token_file=5"):
        read_settings("[http]\ntoken_file = 5\n")


# Variables of the environment -----------------------------------------------------------------------------------------


def test_a_flag_goes_before_a_variable_and_that_before_the_file() -> None:
    text = '[store]\ndram = "1GiB"\nnvme = "2GiB"\ndata = "/file"\n[log]\nlevel = "error"\n'
    variables = {"KVSTORE_STORE_DRAM": "3GiB", "KVSTORE_STORE_NVME": "4GiB", "KVSTORE_LOG_LEVEL": "debug", "HOME": "/"}
    settings = read_settings(text, {"store": {"dram": "5GiB", "nvme": None}}, environment=variables)
    assert (settings.store.dram, settings.store.nvme, settings.store.data) == ("5GiB", "4GiB", "/file")
    assert settings.log.level == "debug"


def test_each_setting_has_a_variable_and_each_kind_of_value_can_be_written() -> None:
    given = {
        "KVSTORE_STORE_POLICY": "adaptive",
        "KVSTORE_STORE_NVME_WRITES": "100.5",
        "KVSTORE_STORE_PREFAULT": "false",
        "KVSTORE_DOOR_USERS": "[1000, 1001]",
        "KVSTORE_DOOR_MODE": "600",
        "KVSTORE_DOOR_SHARE": "0.25",
        "KVSTORE_DOOR_CONNECTIONS": "7",
        "KVSTORE_LIMITS_LEASE_SECONDS": "12",
        "KVSTORE_HTTP_LISTEN": "127.0.0.1:9797",
        "KVSTORE_OBSERVE_SOCKET": "/run/o.sock",
        "KVSTORE_ADMIN_SOCKET": "/run/a.sock",
        "KVSTORE_LOG_FORMAT": "text",
    }
    settings = read_settings("", environment=given)
    assert (settings.store.policy, settings.store.nvme_writes, settings.store.prefault) == ("adaptive", 100.5, False)
    assert settings.door.users == [1000, 1001] and settings.door.mode == "600" and settings.door.share == 0.25
    assert settings.door.connections == 7 and settings.limits.lease_seconds == 12
    assert settings.http.listen == "127.0.0.1:9797" and settings.observe_socket == "/run/o.sock"
    assert settings.admin_socket == "/run/a.sock" and settings.log.format == "text"


def test_short_names_are_those_of_the_store_and_long_ones_go_before_them() -> None:
    short = {"KVSTORE_DATA": "/short", "KVSTORE_DRAM": "1GiB", "KVSTORE_NVME": "off"}
    settings = read_settings("", environment=short)
    assert (settings.store.data, settings.store.dram, settings.store.nvme) == ("/short", "1GiB", "off")
    assert read_settings("", environment={**short, "KVSTORE_STORE_DATA": "/long"}).store.data == "/long"
    assert read_settings('[store]\ndata = "/file"\n', environment={"KVSTORE_DATA": ""}).store.data == "/file"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KVSTORE_STORE_DRAMM", "1GiB", "did you mean KVSTORE_STORE_DRAM?"),
        ("KVSTORE_DOOR_LIMITS", "1", "names no setting"),
        ("KVSTORE_TENANTS_MINE_SOCKET", "/s", r"\[tenants.NAME\]"),
        ("KVSTORE_DOOR_SHARE", "much", "door.share='much'; give the part of each tier"),
        ("KVSTORE_DOOR_USERS", "everybody", "door.users='everybody'"),
        ("KVSTORE_STORE_PREFAULT", "yes", "true or false"),
        ("KVSTORE_LIMITS_LEASE_SECONDS", "1\n[store]\ndram = 1", "limits.lease_seconds="),
        ("KVSTORE_STORE_DRAM", "", "store.dram=''"),
        ("KVSTORE_STORE_" + "X" * 5000, "1", "names no setting"),
    ],
)
def test_a_variable_that_cannot_be_is_one_line(name: str, value: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        read_settings("", environment={name: value})
    assert "\n" not in str(caught.value).replace("\\n", "") and len(str(caught.value)) < 1100


def test_other_programs_variables_are_none_of_its_business() -> None:
    others = {"KVSTORE_TRACEBACK": "1", "KVSTORE_PROMTOOL": "/p", "KVSTOREX": "1", "STORE_DRAM": "1", "KVSTORE_": "x"}
    assert read_settings("", environment=others) == read_settings("")
