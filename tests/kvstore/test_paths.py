"""Paths as people give them: homes, names that are not UTF-8, and what is no path; and a client without torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvstore
from kvstore.block.errors import BadInput
from kvstore.config import expanded
from kvstore.service.settings import read_settings
from programs import run_python
from service.test_serve import ended, serving
from test_cli import error_line, run_cli, told
from workbench import MODEL, ids, random_pages, refused, small_layout

NOT_TEXT = os.fsdecode(b"\xff\xfe dir")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    return home


def test_a_home_is_meant_where_a_path_begins_with_a_tilde(home: Path) -> None:
    assert expanded("~/kv") == str(home / "kv")
    assert expanded("~") == str(home)
    assert expanded("./~/kv") == "./~/kv" and expanded("a/~") == "a/~"
    assert expanded(Path("kv")) == expanded(b"kv") == "kv"


@pytest.mark.parametrize("path", ["", "a\0b", "~nobody-of-this-name/kv"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match=r"^data='.*'"):
        expanded(path, "data")
    if path:
        with pytest.raises(BadInput):
            kvstore.open(f"embedded:{path}")
        with pytest.raises(BadInput):
            kvstore.open(f"unix:{path}")


def test_a_store_in_the_home_makes_no_directory_called_tilde(home: Path) -> None:
    kvstore.open("embedded:~/kv", dram="1MiB").close()
    kvstore.embedded("~/kv2", dram="1MiB").close()
    assert sorted(one.name for one in home.iterdir()) == ["kv", "kv2"]
    assert list(Path.cwd().iterdir()) == []


def test_every_path_of_the_settings_may_begin_with_a_tilde(home: Path) -> None:
    text = '[store]\ndata = "~/kv"\n[door]\nsocket = "~/s"\n[admin]\nsocket = "~/a"\n[tenants.b]\nsocket = "~/b"\n'
    settings = read_settings(text)
    assert settings.store.data == str(home / "kv") and settings.admin_socket == str(home / "a")
    assert sorted(one.socket for one in settings.sockets().values()) == [str(home / "b"), str(home / "s")]
    flags = {"store": {"data": "~/other"}, "door": {"socket": None}, "http": {"listen": None}}
    assert read_settings("", flags).store.data == str(home / "other")
    with pytest.raises(BadInput, match=r"door\.socket="):
        read_settings('[door]\nsocket = "~nobody-of-this-name/s"\n')


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["stat"], ["fsck", "~/none"], ["replay", "~/none"], ["warm", "~/none", "--namespace", "a"]]
)
def test_every_path_of_the_command_line_may_begin_with_a_tilde(home: Path, command: list[str]) -> None:
    if command == ["stat"]:
        command = ["stat", "--data=~/none"]
    assert str(home / "none") in error_line(run_cli(*command, seconds=60))


@pytest.mark.slow
def test_a_directory_whose_name_is_not_utf_8_is_served_and_checked(tmp_path: Path) -> None:
    directory = tmp_path / NOT_TEXT
    directory.mkdir()
    with serving(directory, "--nvme", "16MiB") as (process, said):
        assert said["serving"] == [str(directory / "kv" / "kvstore.sock")]
        assert told("stat", "--data", str(directory / "kv"))["pid"] == said["pid"]
        kvstore.open(f"unix:{said['serving'][0]}").close()
        assert ended(process)[0] == 0
    done = run_cli("fsck", str(directory / "kv"), seconds=60)
    assert done.returncode == 0 and "All is well" in done.stdout and "\\udcff" in done.stdout
    with kvstore.open(f"embedded:{directory}/kv", dram="1MiB", nvme="16MiB") as store:
        assert store.warmed(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["stat", "--data", NOT_TEXT],
        ["stat", "--admin-socket", NOT_TEXT],
        ["fsck", NOT_TEXT],
        ["fsck", NOT_TEXT, "--json"],
        ["serve", "--config", NOT_TEXT],
        ["replay", NOT_TEXT],
        ["lint", NOT_TEXT],
        ["warm", NOT_TEXT, "--namespace", "a", "--data", NOT_TEXT],
        ["record", f"{NOT_TEXT}.jsonl", "--data", NOT_TEXT],
    ],
    ids=" ".join,
)
def test_what_is_not_there_under_a_name_that_is_not_utf_8_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = error_line(run_cli(*command, seconds=60))
    assert "\\udcff" in line and "internal error" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", [pytest.param("unix", marks=pytest.mark.slow), "embedded"])
def test_what_is_opened_under_a_name_that_is_not_utf_8(tmp_path: Path, scheme: str) -> None:
    directory = tmp_path / NOT_TEXT
    with kvstore.open(f"{scheme}:{directory}/kv", **({"dram": "1MiB"} if scheme == "embedded" else {})) as store:
        layout = small_layout()
        if scheme == "embedded":
            handle = store.namespace(model=MODEL, layout=layout)
            assert handle.put(ids(128), random_pages(layout, 2)).stored == 2
            return
        with refused(kvstore.Unreachable):
            store.namespace(model=MODEL, layout=layout)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import kvstore
layout = kvstore.Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=64)
with kvstore.open(sys.argv[1]) as store:
    print("opened")
    try:
        store.namespace(model="a" * 40, layout=layout)
    except kvstore.BadInput as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["unix", "embedded"])
def test_without_torch_a_store_can_be_opened_and_the_extra_is_named_where_it_is_needed(
    tmp_path: Path, scheme: str
) -> None:
    with serving(tmp_path) as (_, said):
        url = f"unix:{said['serving'][0]}" if scheme == "unix" else f"embedded:{tmp_path}/other"
        first, said_line = run_python(WITHOUT_TORCH, url).splitlines()
    assert first == "opened" and "torch" in said_line and "pip install 'prefix-kvstore[hf]'" in said_line


def test_opening_a_sidecar_s_store_imports_no_torch() -> None:
    program = "import sys, kvstore; kvstore.open('unix:/nonexistent/s').close(); print('torch' in sys.modules)"
    assert run_python(program) == "False"
