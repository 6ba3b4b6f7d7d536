"""A restart is measured on a directory that a store takes for one of its own; how long it takes, no test asserts."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvstore
from kv_bench import restart, restart_directory, restart_sidecar
from kvstore.bench import sidecar
from kvstore.bench.row import Target
from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput
from tiering.nvme.lmdb_index import DATA_FILE
from tiering.nvme.slab import STAMP_PAGES, latest_stamp
from tiering.nvme.slab_files import DirectFiles
from tiering.slab_header import PAGE_BYTES

PLAN = restart_directory.Plan(blocks=700, prompt_blocks=64)


def opened(directory: Path) -> kvstore.EmbeddedStore:
    return kvstore.open(
        f"embedded:{directory}",
        dram=restart_directory.DRAM_BYTES,
        nvme=PLAN.budget_bytes,
        slab=PLAN.slab_bytes,
        scrub="off",
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("restart") / "store"
    restart_directory.build(made, PLAN, lambda _: None)
    return made


def stamp_is_clean(directory: Path) -> bool:
    raw = (directory / "nvme" / "00000000.slab").read_bytes()
    stamp = latest_stamp([raw[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(STAMP_PAGES)])
    assert stamp is not None
    return stamp.clean


def test_a_store_takes_every_block_in(directory: Path) -> None:
    with opened(directory) as store:
        assert store.warmed(60)
        usage = store.usage()
        assert usage.blocks == PLAN.blocks and usage.nvme is not None and usage.nvme.used == PLAN.blocks
        store.check()
        handle = store.namespace(model=restart_directory.MODEL, layout=restart_directory.SHAPE.layout)
        chains = [handle.match(restart_directory._prompt(number, PLAN.prompt_blocks)) for number in range(1, 40)]
        found = [match.blocks for match in chains if match.blocks]
        assert sum(found) == PLAN.blocks - restart_directory.REAL_BLOCKS
        assert restart_directory.found_blocks(handle, PLAN) == PLAN.blocks
        assert found[0] == PLAN.prompt_blocks and chains[0].tiers == ((HitTier.NVME, PLAN.prompt_blocks),)


def test_one_prompt_is_real_and_the_others_are_refused(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    restart_directory.build(copy, PLAN, lambda _: None)  # what is refused is quarantined
    with opened(copy) as store:
        assert store.warmed(60)
        handle = store.namespace(model=restart_directory.MODEL, layout=restart_directory.SHAPE.layout)
        prompt = restart_directory.real_prompt()
        with handle.lease(handle.match(prompt), deadline_ms=60_000) as lease:
            loaded = handle.get(lease, restart_directory.real_pages().take())
        assert (loaded.tokens, loaded.reason) == (len(prompt), None)
        with handle.lease(handle.match(restart_directory._prompt(1, 1)), deadline_ms=60_000) as lease:
            assert (lease.blocks, lease.reason) == (0, MissReason.CORRUPT)


def test_slabs_are_holes(directory: Path) -> None:
    files = DirectFiles(directory / "nvme")
    sizes = files.sizes()
    files.close()
    allocated = sum(path.stat().st_blocks * 512 for path in (directory / "nvme").glob("*.slab"))
    assert sum(sizes.values()) > PLAN.blocks * restart_directory.FRAME_BYTES
    assert allocated < sum(sizes.values()) / 4


def test_a_start_is_timed_from_open_to_the_last_block(directory: Path, tmp_path: Path) -> None:
    answer = tmp_path / "started.json"
    job = {"directory": str(directory), "answer": str(answer), "kill": False, "blocks": 700, "prompt_blocks": 64}
    restart.main(job)
    started = restart.Started(**json.loads(answer.read_text()))
    assert 0 < started.opened <= started.answered <= started.warmed
    assert stamp_is_clean(directory)
    with pytest.raises(AssertionError, match="700 of 701 blocks"):
        restart.main({**job, "blocks": 701})


def test_the_limit_reads_the_whole_index(directory: Path) -> None:
    index = directory / "nvme" / "index"
    restart._forget(index / DATA_FILE)
    assert restart._pass_over(index) > 0
    with pytest.raises(restart.lmdb.Error):
        restart._pass_over(directory)


def test_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []  # how each process left the directory
    start = restart._start

    def watched(directory: Path, plan: restart_directory.Plan, *, kill: bool = False) -> restart.Started:
        if kill:
            started = start(directory, plan, kill=True)
        else:  # in this process, which has imported what takes seconds
            answer = tmp_path / "started.json"
            restart.main({"directory": str(directory), "answer": str(answer), "kill": False, **asdict(plan)})
            started = restart.Started(**json.loads(answer.read_text()))
            answer.unlink()
        left.append(stamp_is_clean(directory))
        return started

    found: list[tuple[str, bool]] = []  # what each sidecar was started on
    start_sidecar, serve = sidecar.Sidecar.__init__, restart_sidecar.run

    def watched_sidecar(self: sidecar.Sidecar, store: Any, **options: Any) -> None:
        data = Path(store["data"])
        found.append((data.name, data.exists() and stamp_is_clean(data)))
        start_sidecar(self, store, **options)

    def watched_rows(directory: Path, *arguments: Any, **options: Any) -> Any:
        rows = serve(directory, *arguments, **options)
        assert stamp_is_clean(directory) and not directory.with_name("empty").exists()
        return rows

    monkeypatch.setattr(restart, "_start", watched)
    monkeypatch.setattr(sidecar.Sidecar, "__init__", watched_sidecar)
    monkeypatch.setattr(restart_sidecar, "run", watched_rows)
    said: list[str] = []
    result = restart.run(
        restart.RestartOptions(blocks=700, prompt_blocks=64, laps=2, sidecar_laps=2, data=str(tmp_path)), said.append
    )
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert left == [True, False, False, True, True], "those that were killed did not close their store"
    assert [clean for name, clean in found if name != "empty"] == [True, True, False, False]
    assert [name == "empty" for name, _ in found] == [True, *[False, True] * 4], "an empty one before and after each"
    assert [(row["how"], row.samples) for row in result.sections[0].rows] == [("clean", 2), ("killed", 2), ("cold", 1)]
    for row in result.sections[0].rows:
        assert 0 < row["opened"] <= row["answered"] <= row.value and row["limit"] > 0 and row.unit == "s"
        assert row["low"] <= row.value <= row["high"]
        assert row.target is None and row.met is None, "the target is for a million blocks"
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["bench"] == "restart" and plain["index_bytes"] > 0 and len(plain["rows"]) == 3
    assert [(row["how"], row["samples"], row["met"]) for row in plain["sidecar"]] == [
        ("clean", 2, None),
        ("killed", 2, None),
    ]
    for row in plain["sidecar"]:
        assert 0 < row["low"] <= row["value"] <= row["high"] and row["value"] <= row["ready"]
        assert row["limit_of"] == "empty" and row["limit"] > 0 and row["ratio"] > 0
    text = rendered(result)
    assert "700 blocks" in text and "killed" in text and "holes" in text and "kvstore serve" in text
    assert any("700 of 700" in line for line in said) and any("kill" in line for line in said)
    served = [line for line in said if line.startswith("sidecar ")]
    assert len(served) == 4 and "after a clean end" in served[0] and "after a kill" in served[-1]


def test_the_target_grows_with_the_blocks() -> None:
    at_most = partial(Target, is_least=False, of="value")
    laps = [(restart.Started(0.1, 0.2, warmed, 1.0, 0), 0.5) for warmed in (2.0, 5.0, 4.0)]
    row = restart._row("clean", laps, restart.RestartOptions(blocks=2_000_000))
    assert (row.target, row.value, row.met, row["ratio"]) == (at_most(6.0), 4.0, True, 8.0)
    assert restart._row("clean", laps, restart.RestartOptions(blocks=1_000_000)).met is False
    assert restart._row("killed", laps, restart.RestartOptions()).target == at_most(3.0)
    assert restart._row("cold", laps, restart.RestartOptions()).target is None
    assert restart._row("clean", laps, restart.RestartOptions(blocks=999_999)).target is None


@pytest.mark.parametrize("blocks", [0, restart_directory.REAL_BLOCKS, 10**9])
def test_as_many_blocks_as_make_sense(blocks: int) -> None:
    with pytest.raises(BadInput, match=f"blocks={blocks}; give"):
        restart.RestartOptions(blocks=blocks)


def test_too_little_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "disk_room", lambda _: 1 << 20)
    with pytest.raises(BadInput, match=r"--blocks.*--data"):
        restart.run(restart.RestartOptions(blocks=1000, data=str(tmp_path)))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="another directory"):
        restart.run(restart.RestartOptions(blocks=1000, data=str(tmp_path / "file")))


def rendered(result: Any) -> str:
    """What a person sees."""
    console = Console(file=io.StringIO(), width=200)
    result.render(console)
    return console.file.getvalue()  # type: ignore[attr-defined]
