"""deploy/container/Containerfile, as far as it can be followed without an engine that builds images."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.sidecar_process import DEPLOY, ROOT, flags_in, known_flags, serving
from waiting import wait_until

CONTAINERFILE = DEPLOY / "container" / "Containerfile"
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


def test_its_python_is_one_that_is_supported(instructions: list[tuple[str, str]]) -> None:
    (argument,) = of(instructions, "ARG")
    version = argument.partition("=")[2]
    assert f"Programming Language :: Python :: {version}" in (ROOT / "pyproject.toml").read_text()
    assert all(one.startswith("docker.io/library/python:${PYTHON}-slim") for one in of(instructions, "FROM"))


@pytest.mark.slow
def test_what_it_copies_is_enough_for_the_wheel(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    _needs_setuptools()
    for copy in of(instructions, "COPY"):
        if not copy.startswith("--from"):
            *sources, target = copy.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
                    shutil.copytree(ROOT / source, tmp_path / target, ignore=skipped)
                else:
                    shutil.copy(ROOT / source, tmp_path / source)
    assert (tmp_path / "constraints.txt").exists()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "wheels",
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"kvstore/cli/main.py", "tiering/files.py", "kv_kernels/__init__.py"} <= set(archive.namelist())


@pytest.mark.slow
def test_the_source_distribution_can_build_the_image(instructions: list[tuple[str, str]], tmp_path: Path) -> None:
    _needs_setuptools()
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "tests", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=skipped)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {f"deploy/{path.relative_to(DEPLOY)}" for path in DEPLOY.rglob("*") if path.is_file()} <= names
    copied = [copy.split()[:-1] for copy in of(instructions, "COPY") if not copy.startswith("--from")]
    assert {one for sources in copied for one in sources} <= names


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
    for line in of(instructions, "RUN"):
        assert subprocess.run(["sh", "-n", "-c", line], capture_output=True).returncode == 0
        assert shlex.split(line)


def _needs_setuptools() -> None:
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than the 77.0.3 that pyproject.toml asks for")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with what the Makefile itself runs, and nothing that builds images."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "cksum", "tr", "sed"):
        (folder / name).symlink_to(shutil.which(name) or pytest.skip(f"{name} is not installed"))
    return folder


def make_image(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    make = shutil.which("make") or pytest.skip("make is not installed")
    command = [make, "--no-print-directory", "-s", "-C", str(ROOT), "image", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools)}, timeout=60)


def test_make_image_says_in_one_line_that_nothing_builds_here(tools: Path) -> None:
    done = make_image(tools)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode != 0 and done.stdout == "" and len(said) == 1, done
    assert said[0].startswith("error: no image is built here") and "podman buildah docker" in said[0]


@pytest.mark.parametrize(
    ("there", "arguments", "built"),
    [
        (("docker",), (), "docker build -f deploy/container/Containerfile -t kvstore:0.1.0 ."),
        (
            ("docker", "buildah"),
            (),
            "buildah build --format=docker -f deploy/container/Containerfile -t kvstore:0.1.0 .",
        ),
        (
            ("docker", "podman"),
            ("BUILDER=docker", "IMAGE=a/b:c"),
            "docker build -f deploy/container/Containerfile -t a/b:c .",
        ),
    ],
)
def test_make_image_calls_what_is_there(
    there: tuple[str, ...], arguments: tuple[str, ...], built: str, tools: Path
) -> None:
    """Stand-ins: no builder can be had where these tests run. One whose daemon is away is passed over."""
    for name in there:
        (tools / name).write_text(f'#!/bin/sh\n[ "$1" = info ] || echo {name} "$@"\n')
        (tools / name).chmod(0o700)
    if "podman" not in there:
        (tools / "podman").write_text("#!/bin/sh\nexit 125\n")
        (tools / "podman").chmod(0o700)
    done = make_image(tools, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == built
    assert CONTAINERFILE == ROOT / "deploy/container/Containerfile" and CONTAINERFILE.exists()
