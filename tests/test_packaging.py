"""What a built wheel holds: four importable packages, and none of the folders whose names belong to others.

Built twice: from stand-in packages, which shows the packaging table alone and always runs, and from this tree.
"""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "kvstore": "kvstore",
    "tiering": "tiering",
    "engine_adapter": "engine_adapter",
    "kv_kernels": "kernels/kv_kernels",
}
FOLDERS = ("kvstore", "tiering", "engine_adapter", "kernels", "proto", "tests", "benchmarks", "deploy", "docs")
FILES = ("pyproject.toml", "LICENSE", "README.md", "constraints.txt")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
EXTRAS = {"server", "hf", "gpu", "ucx", "tls", "otel", "plot", "test", "dev"}


@pytest.fixture(scope="module")
def stand_in_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("stand_in")
    _copy_files(tree)
    for folder in PACKAGES.values():
        _write(tree / folder / "__init__.py")
        _write(tree / folder / "py.typed")
    for path in (
        "kvstore/service/__init__.py",
        "kvstore/wire/__init__.py",
        "kvstore/wire/store_pb2.pyi",
        "kvstore/console/__init__.py",
        "kvstore/console/static/index.html",
        "kvstore/console/static/uplot/LICENSE",
        "kvstore/demo/__init__.py",
        "kvstore/demo/documents/text.txt",
        "kvstore/demo/trained/model.safetensors",
        "kvstore/insight/__init__.py",
        "kvstore/insight/models.toml",
        "tiering/policies/__init__.py",
        "proto/kvstore/wire/store.proto",
        "tests/test_nothing.py",
        "benchmarks/train.py",
    ):
        _write(tree / path)
    return _build(tree)


@pytest.fixture(scope="module")
def wheel_of_this_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert [folder for folder in PACKAGES.values() if not (ROOT / folder / "__init__.py").exists()] == []
    tree = tmp_path_factory.mktemp("this_tree")
    _copy_files(tree)
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT_BEHIND)
    return _build(tree)


@pytest.mark.slow
@pytest.mark.parametrize("built", ["stand_in_wheel", "wheel_of_this_tree"])
def test_the_wheel_holds_the_four_packages_and_nothing_else(built: str, request: pytest.FixtureRequest) -> None:
    names = _names_in(request.getfixturevalue(built))
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/__init__.py" in names


@pytest.mark.slow
def test_every_module_of_this_tree_is_in_the_wheel(wheel_of_this_tree: Path) -> None:
    modules = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    missing = modules - _names_in(wheel_of_this_tree)
    assert not missing, f"left out, most likely for want of an __init__.py beside them: {sorted(missing)}"


@pytest.mark.slow
def test_the_stubs_of_the_published_protocol_are_in_the_wheel(wheel_of_this_tree: Path) -> None:
    stubs = {
        f"kvstore/wire/{path.stem}{ending}"
        for path in (ROOT / "proto" / "kvstore" / "wire").glob("*.proto")
        for ending in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    }
    assert {"kvstore/wire/__init__.py", "kvstore/wire/store_pb2.pyi", *stubs} <= _names_in(wheel_of_this_tree)


@pytest.mark.slow
def test_data_files_travel_in_the_wheel(stand_in_wheel: Path) -> None:
    names = _names_in(stand_in_wheel)
    assert {
        "kvstore/py.typed",
        "kv_kernels/py.typed",
        "kvstore/wire/store_pb2.pyi",
        "kvstore/console/static/index.html",
        "kvstore/console/static/uplot/LICENSE",
        "kvstore/demo/documents/text.txt",
        "kvstore/demo/trained/model.safetensors",
        "kvstore/insight/models.toml",
    } <= names


def test_the_metadata_is_what_people_install_by(stand_in_wheel: Path) -> None:
    metadata, entry_points, names = _read(stand_in_wheel)
    assert metadata["Name"] == "prefix-kvstore"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "kvstore = kvstore.cli.main:main" in entry_points.splitlines()
    assert set(metadata.get_all("Provides-Extra", [])) >= EXTRAS
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[^\w-]", line)[0] for line in required) == ["msgspec", "numpy", "xxhash"]


def _copy_files(tree: Path) -> None:
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)


@pytest.mark.slow
def test_the_wheel_without_extras_says_its_version_and_what_its_commands_need(
    wheel_of_this_tree: Path, tmp_path: Path
) -> None:
    """In an environment of its own, made as a user makes it."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    python, program = (str(tmp_path / "venv/bin" / name) for name in ("python", "kvstore"))
    installed = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", str(wheel_of_this_tree)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert installed.returncode == 0, installed.stderr

    def told(*command: str) -> tuple[int, str, str]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    version = importlib.metadata.version("prefix-kvstore")
    for start in ((program,), (python, "-P", "-m", "kvstore")):
        assert told(*start, "--version") == (0, f"kvstore {version}\n", "")
        for words in (["--help"], ["-h"], []):
            status, shown, error = told(*start, *words)
            assert (status, error) == (0, "") and "serve, " in shown and "pip install '.[server]'" in shown
    assert told(program, "--version", "--json") == (0, f'{{"version": "{version}"}}\n', "")
    status, shown, error = told(program, "stat", "--help")
    assert (status, shown, error.count("\n")) == (2, "", 1) and "this needs the package typer" in error
    assert told(python, "-P", "-c", "import kvstore; kvstore.open") == (0, "", "")


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


def _build(tree: Path) -> Path:
    """The wheel of `tree`, built by the setuptools at hand so that no network is needed."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    version = importlib.metadata.version("setuptools")
    if int(version.split(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is older than the 77.0.3 that pyproject.toml asks for")
    out = tree / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
        ".",
    ]
    result = subprocess.run([*command, "-w", str(out), "."], cwd=tree, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def _names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _read(wheel: Path) -> tuple[Message, str, set[str]]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        parsed = Parser().parsestr(archive.read(metadata).decode())
        return parsed, archive.read(entry_points).decode(), set(names)
