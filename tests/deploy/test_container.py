"""deploy/container, as far as it can be followed without what builds images."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
from deploy.sidecar_process import DEPLOY, ROOT, flags_in, known_flags, serving
from waiting import wait_until

CONTAINERFILE = DEPLOY / "container" / "Containerfile"
BUILD = CONTAINERFILE.with_name("build.sh")
OWN_USER = 47110


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """Name and arguments of each, in order."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if line.strip() and line[0] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def of(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for one, rest in instructions if one == name]


@pytest.mark.slow
def test_it_starts_the_sidecar_as_a_user_of_its_own(instructions: list[tuple[str, str]]) -> None:
    (entry,) = of(instructions, "ENTRYPOINT")
    assert json.loads(entry) == ["/opt/kvstore/bin/kvstore", "serve"]
    arguments = json.loads(of(instructions, "CMD")[-1])
    assert flags_in(arguments) <= known_flags()
    assert of(instructions, "USER") == [f"{OWN_USER}:{OWN_USER}"]
    assert of(instructions, "STOPSIGNAL") == ["SIGTERM"]
    volumes = json.loads(of(instructions, "VOLUME")[0])
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert [given["--data"], str(Path(given["--socket"]).parent)] == volumes
    assert of(instructions, "EXPOSE") == [given["--http"].rpartition(":")[2]]


def test_it_is_made_of_debian_s_packages_and_a_python_that_is_supported(instructions: list[tuple[str, str]]) -> None:
    assert of(instructions, "FROM") == ["scratch AS debian", "debian AS build", "debian"], "no registry is asked"
    assert of(instructions, "ADD") == ["debian.tar /"]
    script = BUILD.read_text()
    (suite, version) = re.findall(r"^suite=(\w+) python=([0-9.]+)", script, re.M)[0]
    assert (suite, version) == ("bookworm", "3.11")
    assert f"Programming Language :: Python :: {version}" in (ROOT / "pyproject.toml").read_text()
    assert f"EXTRAS=${{EXTRAS:-{of(instructions, 'ARG')[0].partition('=')[2]}}}".lower() in script.lower()


def test_the_server_needs_no_torch() -> None:
    """Whatever `prefix-kvstore[server]` brings, and whatever that brings."""
    found: set[str] = set()
    wanted = [("prefix-kvstore", "server")]
    while wanted:
        name, extra = wanted.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement, _, marker = line.partition(";")
            named = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
            if named is None or named.group(1) == extra:
                other = re.split(r"[^\w.-]", requirement.strip())[0].lower()
                if _is_installed(other):
                    wanted.append((other, ""))
    assert {"fastapi", "lmdb", "numpy"} <= found
    assert not {one for one in found if re.match(r"torch|triton|transformers|nvidia", one)}


@pytest.mark.slow
def test_the_health_check_tells_ready_from_gone(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    (check,) = of(instructions, "HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    assert command[0] == "/opt/kvstore/bin/python" and "127.0.0.1:9797/readyz" in command[-1]
    with serving("--data", str(tmp_path / "kv"), "--dram", "16MiB", "--nvme", "off", "--http", "127.0.0.1:0") as served:
        mine = [sys.executable, *command[1:-1], command[-1].replace(":9797/", f":{served[1]['http_port']}/")]
        assert subprocess.run(mine, capture_output=True, timeout=30).returncode == 0
    wait_until(lambda: subprocess.run(mine, capture_output=True, timeout=30).returncode != 0)


def test_its_shell_lines_are_shell(instructions: list[tuple[str, str]]) -> None:
    assert subprocess.run(["sh", "-n", str(BUILD)], capture_output=True).returncode == 0
    for line in of(instructions, "RUN"):
        assert subprocess.run(["sh", "-n", "-c", line], capture_output=True).returncode == 0
        assert shlex.split(line)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


NEEDED = "sh cat cksum tr sed dirname rm mkdir cp seq uname grep"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the Makefile and the script run, and nothing that builds images."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED.split():
        (folder / name).symlink_to(shutil.which(name) or pytest.skip(f"{name} is not installed"))
    return folder


def make_image(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a tree of its own, which has what the script looks at before it calls others."""
    make, tree = shutil.which("make") or pytest.skip("make is not installed"), tools.parent / "tree"
    for name in ("Makefile", "deploy/container/build.sh", "deploy/container/Containerfile", "kvstore/__init__.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [make, "--no-print-directory", "-s", "-C", str(tree), "image", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools)}, timeout=60)


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    """The line with which it ended."""
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and done.stdout == "" and len(said) == 1, done
    return said[0]


def stand_in(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o700)


def test_make_image_says_in_one_line_what_is_not_there(tools: Path) -> None:
    error = said_by(make_image(tools))
    assert "no image is built here" in error and "podman buildah docker" in error
    stand_in(tools, "podman", "")
    assert "mmdebstrap" in said_by(make_image(tools))


IMAGE = f"kvstore:{kvstore.__version__}"


@pytest.mark.parametrize(
    ("there", "arguments", "built"),
    [
        (("docker",), (), f"docker build --build-arg EXTRAS=server,tls -t {IMAGE} build/image"),
        (
            ("docker", "buildah"),
            (),
            f"buildah build --format=docker --build-arg EXTRAS=server,tls -t {IMAGE} build/image",
        ),
        (
            ("docker", "podman"),
            ("BUILDER=docker", "IMAGE=a/b:c", "IMAGE_EXTRAS=demo"),
            "docker build --build-arg EXTRAS=demo -t a/b:c build/image",
        ),
    ],
)
def test_make_image_calls_what_is_there(
    there: tuple[str, ...], arguments: tuple[str, ...], built: str, tools: Path
) -> None:
    """Stand-ins. A builder whose daemon is away is passed over."""
    for name in there:
        stand_in(tools, name, f'[ "$1" = info ] || echo {name} "$@"')
    if "podman" not in there:
        stand_in(tools, "podman", "exit 125")
    stand_in(tools, "mmdebstrap", "for one; do last=$one; done; echo root > $last")
    stand_in(tools, "python3", "")
    done = make_image(tools, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == built
    context = {path.name for path in (tools.parent / "tree/build/image").iterdir()}
    assert context == {"Containerfile", "debian.tar", "wheels"}
