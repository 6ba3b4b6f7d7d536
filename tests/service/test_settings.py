"""The sidecar's configuration: what people may write, and what they are told. `test_serve.py` has the flags."""

from __future__ import annotations

import pytest

from kvstore.block.errors import BadInput
from kvstore.service.settings import MAX_USER, read_settings
from workbench import one_line


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (b'[store]\ndata = "\xff"\n', ("not UTF-8 at byte 16",)),
        ("[store]\ndata = ''\n", ("store.data=''", "not empty")),
        ('[store]\ndata = "a\\u0000b"\n', ("store.data='a\\x00b'", "give text")),
        ("[store]\ndram = 'AUTO'\n", ("store.dram='AUTO'", "or auto")),
        ("[store]\nnvme = 'none'\n", ("store.nvme='none'", "or auto", "or off")),
        ("[store]\nnvme = 'off'\nslab = 'large'\n", ("store.slab='large'",)),
        ("[store]\nextent = 'auto'\n", ("store.extent='auto'",)),
        ("[store]\nscrub = 'fast'\n", ("store.scrub='fast'", "or off")),
        ("[store]\npolicy = 'arc'\n", ("store.policy='arc'", "allowed: lru, adaptive")),
        ("[store]\nnvme_writes = 'some'\n", ("store.nvme_writes='some'", "give all, learned, or how many times")),
        ("[store]\nnvme_writes = -1\n", ("store.nvme_writes=-1", "give all, learned, or how many times")),
        ("[store]\nnvme_writes = true\n", ("store.nvme_writes=True", "give all or learned, in quotes, or a number")),
        ("[store]\nnvme_writes = ''\n", ("store.nvme_writes=''", "give all or learned, in quotes, or a number")),
        ("[store]\nnvme = 'off'\nnvme_writes = 1.0\n", ("store.nvme_writes=1.0", "there is none", "give store.nvme a")),
        ("[store]\npolicy = 1\n", ("store.policy=1", "give lru or adaptive, in quotes")),
        ("[store]\npolicy = ''\n", ("store.policy=''", "give lru or adaptive, in quotes")),
        ("[log]\nlevel = 3\n", ("log.level=3", "give debug, info, warning or error, in quotes")),
        (
            "[tenants]\nshare = 0.2\n",
            ("tenants.share=0.2", "write [tenants.NAME] and its keys", "socket, users, share"),
        ),
        ("[tenants]\na = 0.2\n", ("tenants.a=0.2", "write [tenants.a] and its keys", "socket, users, share")),
        ("tenants = 0.2\n", ("tenants=0.2", "write [tenants.NAME] and keys")),
        ("[door]\nshare = 1.5\n", ("door.share=1.5", "guaranteed to it, 0 to 1")),
        ("[door]\nweight = 0\n", ("door.weight=0", "0.001 to 1000")),
        ("[tenants.a]\nsocket = 'a'\nshare = 'half'\n", ("tenants.a.share='half'", "a number")),
        ("[tenants.a]\nsocket = 'a'\nshare = 0.7\n[door]\nshare = 0.4\n", ("come to 1.1", "default 0.4, a 0.7")),
        ("[store]\nkeeper = 'yes'\n", ("store.keeper='yes'", "true or false")),
        ("[door]\nmode = 660\n", ("door.mode=660", "in quotes")),
        ("[door]\nsocket = ''\n", ("door.socket=''",)),
        (f"[door]\nsocket = '{'x' * 120}'\n", ("door.socket=xxx", "107 bytes")),
        (f"[tenants.a]\nsocket = '{'x' * 120}'\n", ("tenants.a.socket=xxx", "107 bytes")),
        ("[door]\nusers = [1, -1]\n", ("door.users=[1, -1]", "-1 is no user id", str(MAX_USER))),
        (f"[tenants.a]\nsocket = 's'\nusers = [{1 << 32}]\n", ("tenants.a.users=", "no user id")),
        ("[tenants.default]\nsocket = 's'\n", ("tenants.default", "door.socket")),
        ("[door]\nrate = inf\n", ("door.rate=inf", "more than 0")),
        ("[door]\nsweep_seconds = inf\n", ("door.sweep_seconds=inf", "at most 10")),
        ("[door]\nsweep_seconds = 11\n", ("door.sweep_seconds=11", "at most 10")),
        ("[door]\nsilence_seconds = 1e300\n", ("door.silence_seconds=1e+300", "at most")),
        ("[limits]\nlease_seconds = inf\n", ("limits.lease_seconds=inf", "at most")),
        ("[http]\nlisten = '127.0.0.1:\u00b2'\n", ("http.listen=", "HOST:PORT")),
        ("[http]\nlisten = '127.0.0.1:65536'\n", ("http.listen='127.0.0.1:65536'", "65535")),
        ('[http]\nlisten = "a\\u0000:1"\n', ("http.listen=",)),
        ("[keys]\ncold_start = ''\n", ("keys.cold_start=''",)),
        ("[keys]\ncold_start = '0123'\n", ("keys.cold_start='0123'", "16 hexadecimal digits")),
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
    assert settings.door.limits.connections == 7 and settings.limits.lease_seconds == 12
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
        ("KVSTORE_DOOR_SHARE", "much", "door.share='much'; give a number"),
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
