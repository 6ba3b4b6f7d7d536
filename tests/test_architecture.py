"""The rules on rooms, floors and doors hold in this tree, and each of them bites when it is broken.

The rules themselves, with every exemption and its reason, are the tables of architecture.py.
"""

from pathlib import Path

import pytest

import architecture
from programs import ROOT, run_python

# What `import kvstore` must not bring along: it happens in every engine's process and in the sidecar.
HEAVY = ("torch", "triton", "transformers", "vllm", "sglang", "lmcache")
# The client is imported by engines; all the rest is what `kvstore serve` is made of.
LIGHT_MODULES = (
    "kvstore",
    "kvstore.cli.main",
    "kvstore.node",
    "kvstore.client.sidecar_store",
    "kvstore.service.dispatch",
    "kvstore.service.local_door",
    "kvstore.edge.pages",
    "kvstore.console.part",
    "kvstore.network.part",
    "kvstore.openai.proxy",
)


@pytest.fixture(scope="module")
def found_here() -> list[architecture.Violation]:
    return architecture.violations(ROOT)


@pytest.mark.parametrize("rule", architecture.RULES)
def test_the_tree_keeps_the_rule(rule: str, found_here: list[architecture.Violation]) -> None:
    broken = [str(violation) for violation in found_here if violation.rule == rule]
    assert not broken, f"{architecture.RULES[rule]}:\n" + "\n".join(broken)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_it_brings_no_heavy_package(module: str, tmp_path: Path) -> None:
    program = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    found = run_python(program, cwd=tmp_path)
    assert not found, f"importing {module} also imports {found}"


# --- each rule bites -------------------------------------------------------------------------------------------------
# One line of source in one file of an otherwise empty tree, and the one rule that must speak up about it.

BROKEN: tuple[tuple[str, str, str], ...] = (
    ("syntax", "kvstore/core/store.py", "def ("),
    # Floors.
    ("arrow", "kernels/kv_kernels/int8.py", "import tiering.frame"),
    ("arrow", "kernels/kv_kernels/int8.py", "from kvstore.block.errors import StoreError"),
    ("arrow", "tiering/dram/tier.py", "from kvstore import core"),
    ("arrow", "tiering/policies/lru.py", "import engine_adapter"),
    ("arrow", "kvstore/core/store.py", "from engine_adapter import adapter"),
    ("arrow", "kvstore/client/sidecar_store.py", "from engine_adapter.adapter import StoreRequest"),
    ("arrow", "kvstore/core/store.py", "from kvstore import cli"),
    ("arrow", "kvstore/core/store.py", "from .. import traffic"),
    ("arrow", "kvstore/service/dispatch.py", "from ..demo.documents import load"),
    ("arrow", "kvstore/__init__.py", "def open():\n    import kvstore.cli.main"),
    ("arrow", "tiering/dram/tier.py", "import importlib\nimportlib.import_module('kvstore.core.store')"),
    ("arrow", "tiering/dram/tier.py", "__import__('kvstore')"),
    # Entrances.
    ("entrance", "engine_adapter/hf_cache.py", "import kvstore.traffic"),
    ("entrance", "kvstore/demo/passes.py", "from kvstore.traffic import run"),
    ("entrance", "kvstore/demo/passes.py", "from kvstore.cli.main import main"),
    ("entrance", "kvstore/traffic/run.py", "from kvstore import demo"),
    # Rooms that import less than lies below them.
    ("room", "kvstore/client/handle.py", "from kvstore.core.store import Store"),
    ("room", "kvstore/client/handle.py", "import kvstore.service.dispatch"),
    ("room", "kvstore/core/store.py", "from kvstore.client.handle import Lease"),
    ("room", "kvstore/core/store.py", "from kvstore import service"),
    ("room", "kvstore/protocol/messages.py", "from kvstore.core.store import Store"),
    ("room", "kvstore/protocol/messages.py", "from kvstore.client import lease"),
    ("room", "kvstore/block/layout.py", "from kvstore.protocol import door"),
    ("room", "tiering/remote/valkey.py", "from tiering.nvme.tier import NvmeTier"),
    # What a room must not know of.
    ("closed-room", "tiering/dram/tier.py", "import kv_kernels.device_copy"),
    ("closed-room", "tiering/nvme/tier.py", "import torch"),
    ("closed-room", "tiering/nvme/tier.py", "from torch.cuda import Stream"),
    ("closed-room", "tiering/nvme/tier.py", "def f():\n    import torch"),
    ("closed-room", "kernels/kv_kernels/__init__.py", "import triton"),
    ("closed-room", "kernels/kv_kernels/plain.py", "def f():\n    from triton import language"),
    ("closed-room", "kvstore/block/codec.py", "import triton"),
    ("closed-room", "engine_adapter/hf_cache.py", "import triton.language as tl"),
    # Engines.
    ("engine", "engine_adapter/adapter.py", "import vllm"),
    ("engine", "engine_adapter/hf_cache.py", "import sglang"),
    ("engine", "engine_adapter/vllm_connector.py", "from transformers import PretrainedConfig"),
    ("engine", "engine_adapter/sglang_storage.py", "from vllm.v1 import core"),
    ("engine", "engine_adapter/lmcache_backend.py", "import vllm"),
    ("engine", "kvstore/insight/planner.py", "def f():\n    from transformers import AutoConfig"),
    ("engine", "kvstore/demo/passes.py", "import vllm"),
    ("engine", "kernels/kv_kernels/triton_pools.py", "import sglang.srt"),
    ("foreign-folder", "kvstore/core/store.py", "from kernels.kv_kernels import triton_pools"),
    ("foreign-folder", "tiering/dram/tier.py", "import tests.fakes"),
    ("foreign-folder", "kvstore/cli/bench.py", "def f():\n    from kv_bench import restart"),
    ("foreign-folder", "kernels/kv_kernels/device_copy.py", "from chaos import ChaosDevice"),
    ("engine", "kvstore/traffic/run.py", "import vllm"),
    ("engine", "kvstore/traffic/run.py", "import transformers"),
    # Where imports stand.
    ("local-import", "kvstore/core/store.py", "def f():\n    from kvstore import node"),
    ("local-import", "kvstore/core/store.py", "class A:\n    async def f(self):\n        from . import node"),
    ("local-import", "kvstore/service/__init__.py", "def f():\n    import tiering"),
    (
        "local-import",
        "kvstore/core/store.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tiering",
    ),
    ("local-import", "kvstore/core/store.py", "import typing\nif typing.TYPE_CHECKING:\n    from kvstore import lease"),
    ("local-import", "kvstore/cli/main.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tiering"),
    ("local-import", "engine_adapter/adapter.py", "import importlib\ndef f():\n    importlib.import_module('kvstore')"),
    ("hidden-import", "kvstore/core/store.py", "import importlib\nimportlib.import_module('kv' + 'store')"),
    ("hidden-import", "kvstore/core/store.py", "from importlib import import_module as load\nload(name)"),
    ("hidden-import", "kvstore/core/store.py", "__import__(name)"),
    ("hidden-import", "kvstore/core/store.py", "from tiering.errors import *"),
    # Clock.
    ("handed-in", "tiering/dram/mover.py", "import time\nstart = time.monotonic()"),
    ("handed-in", "kvstore/core/leases.py", "import time as t\nt.time_ns()"),
    ("handed-in", "kvstore/core/leases.py", "from time import perf_counter"),
    ("handed-in", "kvstore/core/leases.py", "import time\ndef f(clock=time.monotonic): ..."),
    ("handed-in", "kvstore/client/sidecar_store.py", "import time\ntime.sleep(1)"),
    ("handed-in", "kvstore/events.py", "from datetime import datetime\ndatetime.now()"),
    ("handed-in", "kvstore/events.py", "import datetime as d\nd.datetime.now().isoformat()"),
    ("handed-in", "tiering/files.py", "import time\ntime.monotonic()"),
    # Randomness.
    ("handed-in", "tiering/policies/lru.py", "import random\nrandom.random()"),
    ("handed-in", "tiering/policies/lru.py", "from random import choice"),
    ("handed-in", "tiering/policies/lru.py", "import random\nrng = random.Random(7)"),
    ("handed-in", "kvstore/block/identity.py", "import secrets\nsecrets.token_bytes(32)"),
    ("handed-in", "kvstore/block/identity.py", "import os\nos.urandom(32)"),
    ("handed-in", "kvstore/events.py", "import uuid\nuuid.uuid4()"),
    ("handed-in", "kvstore/insight/whatif.py", "import numpy as np\nnp.random.default_rng()"),
    # Disk.
    ("handed-in", "tiering/nvme/tier.py", "import os\nos.pwrite(3, b'', 0)"),
    ("handed-in", "tiering/nvme/tier.py", "import os\nos.pread(3, 1, 0)"),
    ("handed-in", "tiering/nvme/tier.py", "import os\nos.open('x', 0)"),
    ("handed-in", "tiering/nvme/tier.py", "import os\nos.fsync(3)"),
    ("handed-in", "tiering/nvme/tier.py", "import os\nos.fdatasync(3)"),
    ("handed-in", "tiering/nvme/tier.py", "import os\nos.rename('a', 'b')"),
    ("handed-in", "tiering/nvme/tier.py", "from os import unlink"),
    ("handed-in", "tiering/nvme/tier.py", "import posix\nposix.pwrite(3, b'', 0)"),
    ("handed-in", "tiering/nvme/tier.py", "import os.path\nos.path.exists('x')"),
    ("handed-in", "tiering/nvme/tier.py", "from os import path\npath.getsize('x')"),
    ("handed-in", "tiering/dram/extents.py", "open('x')"),
    ("handed-in", "kvstore/config.py", "with open('x') as f: ..."),
    ("handed-in", "kvstore/config.py", "import io\nio.open('x')"),
    ("handed-in", "kvstore/insight/replay.py", "import gzip\ngzip.open('x')"),
    ("handed-in", "kvstore/config.py", "import shutil\nshutil.rmtree('x')"),
    ("handed-in", "kvstore/config.py", "import tempfile\ntempfile.mkdtemp()"),
    ("handed-in", "kvstore/config.py", "from pathlib import Path\nPath('x').read_text()"),
    ("handed-in", "kvstore/config.py", "def f(p): return p.write_bytes(b'')"),
    ("handed-in", "kvstore/config.py", "from pathlib import Path\ndef f(p: Path): p.unlink()"),
    ("handed-in", "kvstore/config.py", "from pathlib import Path\ndef f(p: Path | None): (p / 'x').exists()"),
    (
        "handed-in",
        "kvstore/config.py",
        "from pathlib import Path\np = Path('x')\nq = p / 'y'\nq.with_suffix('').open()",
    ),
    ("handed-in", "kvstore/config.py", "import pathlib\nclass A:\n    def f(self, p: pathlib.Path): p.parent.mkdir()"),
    (
        "handed-in",
        "kvstore/config.py",
        "from pathlib import Path\nclass A:\n    p: Path\n    def f(self): self.p.stat()",
    ),
    ("handed-in", "kvstore/config.py", "from pathlib import Path\nPath.exists('x')"),
    # Shared memory.
    ("handed-in", "tiering/dram/tier.py", "import os\nos.memfd_create('x')"),
    ("handed-in", "tiering/dram/tier.py", "import os\nos.ftruncate(3, 1)"),
    ("handed-in", "kvstore/client/sidecar_store.py", "import mmap\nmmap.mmap(3, 1)"),
    ("handed-in", "kvstore/client/sidecar_store.py", "from mmap import mmap\nmmap(3, 1)"),
    ("handed-in", "tiering/dram/tier.py", "def f(m): m.madvise(4)"),
    # The environment.
    ("environment", "kvstore/config.py", "import os\nos.environ['X']"),
    ("environment", "kvstore/config.py", "import os\nos.environ.get('X')"),
    ("environment", "kvstore/node.py", "import os\nos.getenv('X')"),
    ("environment", "kvstore/demo/passes.py", "from os import environ"),
    ("environment", "kernels/kv_kernels/triton_pools.py", "import os\nos.environ"),
    ("environment", "engine_adapter/adapter.py", "import os\nos.getenv('X')"),
    # Code from data.
    ("unsafe", "kvstore/events.py", "import pickle"),
    ("unsafe", "kvstore/events.py", "from pickle import loads"),
    ("unsafe", "kvstore/events.py", "import marshal"),
    ("unsafe", "engine_adapter/hf_cache.py", "import torch\ntorch.load('x')"),
    ("unsafe", "engine_adapter/hf_cache.py", "from torch import load"),
    ("unsafe", "kvstore/traffic/row.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    ("unsafe", "kvstore/config.py", "eval('1')"),
    ("unsafe", "kvstore/demo/passes.py", "exec('1')"),
    ("unsafe", "kernels/kv_kernels/triton_pools.py", "import builtins\nbuiltins.exec('1')"),
    ("unsafe", "kvstore/config.py", "import yaml\nyaml.load('x', Loader=yaml.SafeLoader)"),
    # Names.
    ("vague-name", "kvstore/utils.py", ""),
    ("vague-name", "tiering/common.py", ""),
    ("vague-name", "tests/helpers.py", ""),
    ("vague-name", "tiering/policies/base.py", ""),
    ("vague-name", "kvstore/service/manager.py", ""),
    ("vague-name", "kvstore/utils/text.py", ""),
    ("shadowing-name", "engine_adapter/vllm.py", ""),
    ("shadowing-name", "engine_adapter/sglang.py", ""),
    ("shadowing-name", "engine_adapter/vllm/__init__.py", ""),
    ("namespace-folder", "kernels/__init__.py", ""),
    ("namespace-folder", "proto/__init__.py", ""),
)


@pytest.mark.parametrize(
    ("rule", "path", "source"), BROKEN, ids=[f"{rule}-{n}" for n, (rule, _, _) in enumerate(BROKEN)]
)
def test_a_broken_rule_is_reported(rule: str, path: str, source: str, tmp_path: Path) -> None:
    found = _violations_of(tmp_path, path, source)
    assert rule in {violation.rule for violation in found}, f"not reported: {path}: {source!r}"
    assert {violation.path for violation in found} == {path}


def test_every_rule_is_shown_to_bite() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(architecture.RULES)


def test_a_report_names_the_place(tmp_path: Path) -> None:
    (violation,) = _violations_of(tmp_path, "tiering/nvme/tier.py", "import os\n\nos.fsync(3)\n")
    assert str(violation) == "tiering/nvme/tier.py:3: [handed-in] uses os.fsync: disk is handed in"


# --- and leaves alone what is allowed --------------------------------------------------------------------------------

KEPT: tuple[tuple[str, str], ...] = (
    # Arrows that point down or stay level.
    ("tiering/dram/tier.py", "from tiering.frame import Frame\nfrom . import errors\nfrom .tier import Tier"),
    (
        "kvstore/core/store.py",
        "import tiering.dram.tier\nfrom kvstore.core import leases\nfrom .table import BlockTable",
    ),
    (
        "engine_adapter/hf/layers.py",
        "import kvstore\nimport tiering.frame\nimport kv_kernels\nimport torch, transformers",
    ),
    ("engine_adapter/vllm_connector.py", "from vllm.v1 import core\nfrom engine_adapter.adapter import StoreRequest"),
    ("engine_adapter/vllm_tier.py", "import vllm"),
    ("engine_adapter/sglang_storage.py", "import sglang"),
    ("engine_adapter/lmcache_backend.py", "import lmcache"),
    ("kvstore/demo/passes.py", "import engine_adapter.hf_cache\nimport transformers\nfrom kvstore import demo"),
    ("kvstore/cli/main.py", "def main():\n    from kvstore.demo import passes\n    import kvstore.traffic.run"),
    ("kvstore/__main__.py", "from kvstore.cli.main import main"),
    ("kvstore/__init__.py", "def open(url):\n    from kvstore.service import client"),
    ("kvstore/core/store.py", "def f():\n    import lmdb"),
    ("kernels/kv_kernels/triton_pools.py", "import triton\nimport triton.language as tl"),
    # Types and pure members of the modules whose acts are handed in.
    ("tiering/policies/lru.py", "import random\ndef f(rng: random.Random): return rng.random()"),
    (
        "kvstore/core/store.py",
        "from datetime import datetime, timedelta\ndef f(now: datetime): return now + timedelta(1)",
    ),
    ("kvstore/core/store.py", "import secrets\nsecrets.compare_digest(b'', b'')"),
    ("kvstore/core/store.py", "import os\nos.close(3); os.getpid(); os.cpu_count(); os.path.join('a', 'b')"),
    ("kvstore/client/sidecar_store.py", "import mmap\ndef f(m: mmap.mmap): return m[0], mmap.PROT_READ"),
    # Words that only look like the disk, and objects that were handed in.
    ("kvstore/core/store.py", "from dataclasses import replace\n'a'.replace('a', 'b'); replace(x, a=1)"),
    (
        "tiering/nvme/tier.py",
        "def f(files, self): files.open('x'); self._files.read_bytes('x'); self.disk.rename('a', 'b')",
    ),
    ("tiering/nvme/tier.py", "def f(clock): clock.time(); clock.sleep(1)"),
    ("kvstore/config.py", "from pathlib import Path\ndef f(p: Path): return p / 'x', p.name, str(p.parent)"),
    ("kvstore/config.py", "from pathlib import Path\ndef f(paths: list[Path]): paths.index(1)"),
    ("engine_adapter/hf_cache.py", "def f(model): model.eval()"),
    ("kvstore/core/store.py", "import re\nre.compile('x')"),
    ("kvstore/core/store.py", "import yaml\nyaml.safe_load('x')"),
    # Exemptions.
    ("tiering/files.py", "import os, mmap\nos.pwrite(3, b'', 0); os.fsync(3); open('x'); mmap.mmap(-1, 1)"),
    (
        "tiering/dram/extents.py",
        "import os, mmap\nm = mmap.mmap(os.memfd_create('x'), 1); os.ftruncate(3, 1); m.madvise(4)",
    ),
    ("kvstore/node.py", "import os, time, random\ntime.monotonic(); os.urandom(8); random.Random(1); open('x')"),
    ("kvstore/cli/main.py", "import os, time\nos.environ.get('X'); time.time(); open('x')"),
    ("kvstore/demo/passes.py", "import time\ntime.perf_counter()"),
    ("engine_adapter/cost/model.py", "import time\ntime.perf_counter()"),
    # Names, and files that are no concern of ours.
    ("tests/kvstore/test_store.py", "import pickle, time, torch\ntime.time()"),
    ("tiering/residency.py", ""),
    ("kvstore/based.py", ""),
    ("kernels/kv_kernels/__init__.py", ""),
    (".venv/lib/utils.py", "import pickle"),
)


@pytest.mark.parametrize(("path", "source"), KEPT, ids=[f"{path}-{n}" for n, (path, _) in enumerate(KEPT)])
def test_what_is_allowed_is_not_reported(path: str, source: str, tmp_path: Path) -> None:
    assert _violations_of(tmp_path, path, source) == []


def test_every_exemption_has_a_reason_and_a_place_in_a_room() -> None:
    for exemption in architecture.EXEMPTIONS:
        assert exemption.path.startswith(architecture.HANDED_IN_ROOMS)
        assert exemption.kinds and exemption.kinds <= architecture.ALL_KINDS
        assert len(exemption.reason.split()) >= 4, f"say why {exemption.path} is exempt"


def _violations_of(tree: Path, path: str, source: str) -> list[architecture.Violation]:
    file = tree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return architecture.violations(tree)
