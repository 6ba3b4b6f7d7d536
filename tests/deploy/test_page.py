"""docs/deploy.md: what it names is there."""

from __future__ import annotations

import re

from deploy.sidecar_process import DEPLOY, ROOT, known_flags
from wrong_values import every_setting

PAGE = (ROOT / "docs" / "deploy.md").read_text()


def test_its_files_and_headings_are_there() -> None:
    files = set(re.findall(r"deploy/[\w./-]*\w", PAGE))
    assert files and all((ROOT / one).exists() for one in files), files
    assert all((ROOT / "docs" / one).exists() for one in re.findall(r"\]\((\w+\.md)\)", PAGE))
    headings = {
        re.sub(r"[^\w -]", "", one).strip().lower().replace(" ", "-") for one in re.findall(r"^#+ (.*)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= headings


def test_its_settings_are_settings() -> None:
    named = re.findall(r"`(store|limits|door|http)\.(\w+)", PAGE)
    assert named
    assert set(named) <= {(section, key) for section, key, _, _ in every_setting()}


def test_its_commands_and_units_are_the_ones_of_deploy() -> None:
    run = re.search(r"  kvstore:0\.1\.0 (--.*)", PAGE)
    assert run is not None and set(re.findall(r"--[a-z]+", run.group(1))) <= known_flags()
    unit = (DEPLOY / "systemd" / "kvstore.service").read_text()
    for line in ("MemorySwapMax=0", "OOMScoreAdjust=500", "OOMPolicy=kill", "LimitNOFILE=65536", "LimitMEMLOCK=0"):
        assert line in unit
    assert "`ulimit -l` may be 0" in PAGE
    for key, value in re.findall(r"`(MemorySwapMax|OOMScoreAdjust|OOMPolicy|LimitNOFILE)=(\w+)`", PAGE):
        assert f"\n{key}={value}\n" in unit
