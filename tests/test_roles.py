"""What people install: the built files in new environments, a role at a time, and the page of each role walked there.

`KVSTORE_DIST` names a folder with files that were built before (`make dist`), which are then what is tested.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import kvstore
import release
from release import ROOT
from test_docs import Block, Reader, blocks_of, run_blocks, text_of

PAGE = "docs/install.md"
FURTHER = {"host": "docs/sidecar.md", "all": "docs/start.md"}
"""Pages that go on from there."""
PACKAGES = {one: one for one in ("kvstore", "tiering", "engine_adapter")} | {"kv_kernels": "kernels/kv_kernels"}
EXTRAS = {*"server adaptive hf gpu demo ucx tls otel plot test dev".split()}
TESTED = ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "constraints.txt", "CHANGELOG.md", "demo-model")
TESTED += ("kvstore", "tiering", "engine_adapter", "kernels", "proto", "deploy", "docs")


def copy_of_the_tree(tree: Path) -> Path:
    """Without what builds leave behind."""
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in TESTED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=skipped)
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distributions and wheels."""
    if given := os.environ.get("KVSTORE_DIST"):
        return Path(given).resolve()
    tree = copy_of_the_tree(tmp_path_factory.mktemp("tree"))
    for project in (tree, tree / "demo-model"):
        release.built(project, tree / "dist")
    return tree / "dist"


@pytest.fixture(scope="module")
def python_of(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a role's environment, made when it is first asked for."""
    made: dict[str, Path] = {}

    def python(role: str) -> Path:
        if role not in made:
            made[role] = release.environment(role, dist, tmp_path_factory.mktemp("environments") / role)
        return made[role]

    return python


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("prefix_kvstore-*.whl")
    return found


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_source_distribution_makes_the_wheel_that_the_tree_makes(dist: Path, tmp_path: Path) -> None:
    for name in ("", "demo-model"):
        tree = copy_of_the_tree(tmp_path / f"tree{name}") / name
        of_tree = release.hook("build_wheel", tree, tmp_path)
        assert contents(of_tree) == contents(dist / of_tree.name)
    (archive,) = dist.glob("prefix_kvstore-*.tar.gz")
    names = {name.partition("/")[2] for name in release.run(["tar", "-tzf", str(archive)], dist).splitlines()}
    deploys = {path.relative_to(ROOT).as_posix() for path in (ROOT / "deploy").rglob("*") if path.is_file()}
    assert deploys | {"constraints.txt", "pyproject.toml"} <= names, "the image is built of it"


def test_the_metadata_is_what_people_install_by(wheel: Path) -> None:
    files = contents(wheel)
    (metadata,) = (Parser().parsestr(files[name].decode()) for name in files if name.endswith(".dist-info/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("prefix-kvstore", kvstore.__version__)
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.11", "Apache-2.0")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    (entry_points,) = (files[name].decode() for name in files if name.endswith(".dist-info/entry_points.txt"))
    assert "kvstore = kvstore.cli.main:main" in entry_points.splitlines()
    assert {*metadata.get_all("Provides-Extra", [])} >= EXTRAS
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[^\w-]", line)[0] for line in required) == ["msgspec", "numpy", "xxhash"]


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    """All of their modules, stubs and data, and none of the folders whose names belong to others."""
    names = contents(wheel).keys()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {*PACKAGES}
    for package, folder in PACKAGES.items():
        modules = {f"{package}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
        missing = modules - names
        assert not missing, f"left out, most likely for want of an __init__.py beside them: {sorted(missing)}"
        assert f"{package}/py.typed" in names
    for path in (ROOT / "proto" / "kvstore" / "wire").glob("*.proto"):
        endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
        assert {f"kvstore/wire/{path.stem}{ending}" for ending in endings} <= names
    data = (
        "console/static/index.html",
        "console/static/uplot/LICENSE",
        "demo/documents/tiers.md",
        "insight/models.toml",
    )
    assert {f"kvstore/{one}" for one in data} <= names


@pytest.mark.slow
def test_the_wheel_is_small_and_the_model_is_a_distribution_of_its_own(dist: Path, wheel: Path) -> None:
    (model,) = dist.glob("prefix_kvstore_demo-*.whl")
    assert wheel.stat().st_size < 1.5e6
    files = {path.name: path.read_bytes() for path in (ROOT / "kvstore/demo/trained").iterdir()}
    theirs = contents(model)
    assert {name.rpartition("/")[2]: theirs[name] for name in theirs if "dist-info" not in name} == files
    assert not any("/trained/" in name for name in contents(wheel))


@pytest.mark.slow
@pytest.mark.parametrize("role", release.ROLES)
def test_a_role_costs_what_its_page_says(role: str, python_of: Callable[[str], Path]) -> None:
    extra = release.ROLES[role]
    (row,) = re.findall(
        rf"^\| {role}:.*`prefix-kvstore{re.escape(extra)}` \| ([0-9,]+) \| ([0-9,]+) \|$", text_of(PAGE), re.M
    )
    count, size = release.cost(python_of(role))
    said = [int(one.replace(",", "")) for one in row]
    if role == "all" and count > said[0]:
        pytest.skip("this torch is not the one for CPUs")
    assert count == said[0] and size == pytest.approx(said[1], rel=0.1), (count, size)


@pytest.mark.slow
def test_an_engine_s_environment_has_version_help_and_doctor(python_of: Callable[[str], Path], tmp_path: Path) -> None:
    python = str(python_of("engine"))
    program = f"{python.rpartition('/')[0]}/kvstore"

    def told(*command: str) -> tuple[int, str, str]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    for start in ((program,), (python, "-P", "-m", "kvstore")):
        assert told(*start, "--version") == (0, f"kvstore {kvstore.__version__}\n", "")
        for words in (["--help"], ["-h"], []):
            status, shown, error = told(*start, *words)
            assert (status, error) == (0, "") and "serve, " in shown
            assert "pip install 'prefix-kvstore[server]'" in shown and "doctor are installed" in shown
    assert told(program, "--version", "--json") == (0, f'{{"version": "{kvstore.__version__}"}}\n', "")
    status, shown, error = told(program, "stat", "--help")
    assert (status, shown, error.count("\n")) == (2, "", 1) and "this needs the package typer" in error
    assert told(python, "-P", "-c", "import kvstore; kvstore.open") == (0, "", "")
    doctor = (program, "doctor", "--dram", "16MiB", "--nvme", "off")
    found = [one["check"] for one in json.loads(told(*doctor, "--json")[1])["findings"]]
    assert "names" in found and len(found) == len(told(*doctor)[1].splitlines())
    assert "usage: kvstore doctor" in told(program, "doctor", "--help")[1]
    (tmp_path / "wrong.toml").write_text("[store]\ndrma = 1\n")
    for wrong, words in (
        ("--dramm=1", "unrecognized"),
        ("--dram=much", "dram"),
        ("--engine=none", "none: No such file"),
    ):
        status, shown, error = told(program, "doctor", wrong)
        assert (status, shown, error.count("\n")) == (2, "", 1) and words in error, error
    assert "drma" in told(program, "doctor", "--config", "wrong.toml")[2]


# The pages ------------------------------------------------------------------------------------------------------------


def blocks_of_role(role: str) -> list[Block]:
    """Of the page's section."""
    lines = text_of(PAGE).splitlines()
    first = lines.index(f"## {role.capitalize()}") + 1
    last = next((at for at in range(first, len(lines)) if lines[at].startswith("## ")), len(lines))
    return [block for block in blocks_of(PAGE) if first < block.line <= last and "elsewhere" not in block.flags]


def is_as_promised(promised: str, printed: str) -> bool:
    """Each promised line was printed, in this order. Numbers may be others, and `...` stands for anything."""
    left = iter(printed.splitlines())
    for line in promised.splitlines():
        pattern = re.sub(r"\\?[0-9][0-9\\.,]*", "[0-9][0-9.,]*", re.escape(line.strip()).replace(r"\.\.\.", ".*"))
        pattern = re.sub(r"(\\ )+", r"\\s+", pattern)
        if not any(re.fullmatch(pattern, one.strip()) for one in left):
            return False
    return True


def test_a_promise_is_read_as_people_read_it() -> None:
    assert is_as_promised("ok  a 1.5 ...\nb 12", "x\nok   a 3.25.1 and more\ny\nb 9")
    for printed in ("ok a 1.5 x", "b 1\nok a 1.5 x", "ok a none x\nb 1"):
        assert not is_as_promised("ok a 1.5 ...\nb 12", printed)


@pytest.fixture
def reader_in(tmp_path: Path) -> Iterator[Callable[[Path], Reader]]:
    readers: list[Reader] = []

    def reader(programs: Path) -> Reader:
        readers.append(Reader(tmp_path, programs))
        return readers[-1]

    yield reader
    for one in readers:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("role", release.ROLES)
def test_the_page_of_a_role_holds_with_the_wheel(
    role: str, python_of: Callable[[str], Path], reader_in: Callable[[Path], Reader]
) -> None:
    reader, printed = reader_in(python_of(role).parent), ""
    blocks = blocks_of_role(role)
    assert {block.tag for block in blocks} == {"sh", "text"}
    for block in blocks:
        if block.tag == "text":
            assert is_as_promised(block.text, printed), f"{block.name} promises other lines than\n{printed}"
        else:
            before = len(reader.typed(None))
            reader.type_block(block.text)
            printed = reader.typed(None)[before:]


@pytest.mark.slow
@pytest.mark.parametrize("role", FURTHER)
def test_the_pages_behind_it_run_with_the_wheel(
    role: str, python_of: Callable[[str], Path], reader_in: Callable[[Path], Reader]
) -> None:
    reader = reader_in(python_of(role).parent)
    for block in run_blocks(FURTHER[role]):
        reader.type_block(block.text)


@pytest.mark.slow
def test_the_sidecar_of_a_host_serves_with_lru_where_numba_is_not(
    python_of: Callable[[str], Path], tmp_path: Path
) -> None:
    kvstore = python_of("host").with_name("kvstore")
    (tmp_path / "c.toml").write_text('[store]\npolicy = "adaptive"\nkeeper = false\n')
    command = [str(kvstore), "serve", "--config", "c.toml", "--data", "kv", "--dram", "16MiB", "--nvme", "off"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None and serving.stdout.readline().startswith("serving ")
        serving.terminate()
        _, log = serving.communicate(timeout=60)
    assert serving.returncode == 0
    (line,) = [one for one in log.splitlines() if "numba" in one]
    assert "pip install 'prefix-kvstore[adaptive]'" in line


@pytest.mark.slow
def test_the_demo_says_where_its_model_is(python_of: Callable[[str], Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python_of("host").with_name("kvstore")), "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'prefix-kvstore[demo]'" in done.stderr and "--seed" in done.stderr


@pytest.mark.slow
def test_another_distribution_of_the_same_name_is_told_in_one_line(
    python_of: Callable[[str], Path], tmp_path: Path
) -> None:
    program, other = [str(python_of("engine").with_name("kvstore"))], tmp_path / "other_tiers-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tiers\nVersion: 1\n")
    (other / "RECORD").write_text("tiering/__init__.py,,\n")
    given: dict[str, Any] = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": str(tmp_path)}}
    done = subprocess.run([*program, "doctor", "--dram", "16MiB", "--nvme", "off"], cwd=tmp_path, timeout=120, **given)
    (line,) = [one for one in done.stdout.splitlines() if re.match("lacks +names", one)]
    assert done.returncode == 1 and "tiering is also of other-tiers" in line and "uninstall other-tiers" in line
    (tmp_path / "tiering").mkdir()
    (tmp_path / "tiering" / "__init__.py").touch()
    done = subprocess.run([*program, "--version"], timeout=60, **given)
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 1 and f"tiering is found at {tmp_path}/tiering/__init__.py, which is not kvstore's" in last
    )


# A release ---------------------------------------------------------------------------------------------------------


COPIED = ("Makefile", "CHANGELOG.md", "pyproject.toml", "constraints.txt", "engines.txt", "engines-alone.txt")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `make release` needs, as a repository."""
    tree = tmp_path / "clone"
    for name in (*COPIED, "tests/release.py", "kvstore/__init__.py", "deploy"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tree / name)
    log = tree / "CHANGELOG.md"
    log.write_text(re.sub(r"^## .*\n", "## 0.2.0 (unreleased)\n", log.read_text(), count=1, flags=re.M))
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        git(tree, *words)
    return tree


def git(tree: Path, *words: str) -> str:
    return release.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false", *words], tree)


def make_release(tree: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-s", "release", f"VERSION={version}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60)


def test_a_release_is_one_command_and_commits_nothing(clone: Path) -> None:
    done = make_release(clone, "0.1.7")
    assert done.returncode == 0 and "nothing is committed" in done.stdout, done.stderr
    assert '__version__ = "0.1.7"\n' in (clone / "kvstore/__init__.py").read_text()
    assert re.search(r"^## 0\.1\.7 \(20\d\d-\d\d-\d\d\)$", (clone / "CHANGELOG.md").read_text(), re.M)
    named = release.run(["grep", "-rhoE", r"(kvstore:|prefix_kvstore-|newTag: )0\.1\.[0-9]+", "deploy"], clone).split()
    assert {re.sub(".*[:-]", "", one) for one in named} <= {"0.1.7", "newTag", ""} and "kvstore:0.1.7" in named
    assert git(clone, "log", "--oneline").count("\n") == 1 and "M kvstore/__init__.py" in git(clone, "status", "-s")


@pytest.mark.parametrize("version", ["", "1", "0.1", "0.1.1rc1", "v0.1.1", "0.1.1; true"])
def test_a_release_of_no_version_is_refused_in_one_line(clone: Path, version: str) -> None:
    refused(make_release(clone, version), "give major.minor.patch")


def test_a_release_of_a_dirty_tree_is_refused_in_one_line(clone: Path) -> None:
    (clone / "new").touch()
    refused(make_release(clone, "0.1.1"), "not committed")
    assert git(clone, "status", "-s") == "?? new\n"


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    said = [line for line in done.stderr.splitlines() if not re.match(r"make(\[\d+\])?: \*\*\*", line)]
    assert done.returncode != 0 and done.stdout == "" and len(said) == 1 and words in said[0], done


def test_what_publishes_is_pinned_and_has_no_secret() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with the extra test")
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", one) for one in used)
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert [name for name, job in jobs.items() if job["permissions"].get("contents") == "write"] == ["tag"]
    assert "secrets." not in text and "password" not in text
    for job in jobs.values():
        for step in job["steps"]:
            assert subprocess.run(["bash", "-n", "-c", step.get("run", "")], timeout=30).returncode == 0
    for target in re.findall(r"make ([\w-]+)", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text() or target == "release"
    assert all((ROOT / name).exists() for name in re.findall(r"tests/\w+\.py", text))
