"""What a release takes, each by one command.

make dist                     the source distribution, and the wheel made of it
make roles                    packages and MiB of each role in a new environment, as docs/install.md has them
make release VERSION=0.1.1    sets the version and dates the changelog's section; commits nothing
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROLES = {"engine": "", "host": "[server]", "all": "[demo]"}
"""Extras of each role's distribution."""
HOOKS = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
"""In the project's folder, as pip calls it; setuptools is the environment's, so that no network is needed."""
PIP = ("-P", "-m", "pip", "--disable-pip-version-check")


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[:5])} failed\n{done.stdout}{done.stderr}")
    return done.stdout


def hook(name: str, project: Path, out: Path) -> Path:
    return out / run([sys.executable, "-P", "-c", HOOKS, name, str(out)], project).splitlines()[-1]


def built(project: Path, out: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made of it."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    archive = hook("build_sdist", project, out)
    for left in project.glob("*.egg-info"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory() as folder:
        run(["tar", "-xzf", str(archive)], Path(folder))
        (tree,) = Path(folder).iterdir()
        return archive, hook("build_wheel", tree, out)


def environment(role: str, wheels: Path, place: Path, *more: str) -> Path:
    """A new one with this role's packages of these wheels; returns its Python."""
    run([sys.executable, "-P", "-m", "venv", str(place)], place.parent)
    python = place / "bin" / "python"
    (wheel,) = wheels.glob("prefix_kvstore-*.whl")
    given = ["-q", "-c", str(ROOT / "constraints.txt"), "--find-links", str(wheels), f"{wheel}{ROLES[role]}", *more]
    run([str(python), *PIP, "install", *given], place.parent)
    return python


def cost(python: Path) -> tuple[int, float]:
    """How many distributions an environment has besides pip and setuptools, and their MiB."""
    listed = run([str(python), *PIP, "list", "--format=freeze", "--exclude=pip", "--exclude=setuptools"], ROOT)
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    theirs = [
        path for path in packages.iterdir() if not re.match(r"(pip|setuptools|pkg_resources|_distutils)", path.name)
    ]
    files = {file.stat().st_ino: file for path in theirs for file in [path, *path.rglob("*")] if file.is_file()}
    return len(listed.split()), sum(file.stat().st_size for file in files.values()) / (1 << 20)


def print_roles(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        for project in (ROOT, ROOT / "demo-model"):
            for file in built(project, wheels):
                print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
        for role in names or ROLES:
            count, size = cost(environment(role, wheels, Path(folder) / role))
            print(f"{role}: prefix-kvstore{ROLES[role]}: {count} packages, {size:,.0f} MiB", flush=True)


def set_version(version: str) -> None:
    """In the one place that has it, in what names the image, and the date in the changelog."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", version):
        raise SystemExit(f"error: VERSION={version!r}; give major.minor.patch: make release VERSION=0.1.1")
    if run(["git", "status", "--porcelain"], ROOT):
        raise SystemExit("error: there are changes that are not committed (git status); commit or stash them first")
    module, log = ROOT / "kvstore" / "__init__.py", ROOT / "CHANGELOG.md"
    text, changes, today = module.read_text(), log.read_text(), datetime.now(UTC).date().isoformat()
    old = re.search(r'^__version__ = "(.*)"$', text, re.M)
    section = re.search(r"^## .*\(unreleased\)$", changes, re.M)
    if old is None or section is None:
        raise SystemExit("error: CHANGELOG.md has no section `## VERSION (unreleased)`; write what has changed there")
    log.write_text(changes.replace(section[0], f"## {version} ({today})", 1))
    module.write_text(text.replace(old[0], f'__version__ = "{version}"', 1))
    named = re.compile(rf"((?<![\w-])kvstore:|newTag: |prefix_kvstore-){re.escape(old[1])}(?![\w.]*\d)")
    for path in (ROOT / "deploy").rglob("*"):
        if path.is_file():
            before = path.read_text()
            if before != (after := named.sub(rf"\g<1>{version}", before)):
                path.write_text(after)
    print(run(["git", "diff", "--stat"], ROOT), end="")
    print(f"version {version}, dated {today}; nothing is committed. If it is right:")
    print(f"git commit -am 'Version {version}' && git tag v{version}")


def main(words: list[str]) -> None:
    match words:
        case ["build", project, out]:
            for file in built(ROOT / project, ROOT / out):
                print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
        case ["roles", *names] if {*names} <= {*ROLES}:
            print_roles(names)
        case ["version", version]:
            set_version(version)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
