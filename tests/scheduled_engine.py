"""vLLM's own scheduler, KV cache manager and connector hooks above a worker that computes KV and states by a formula.

A row of KV and a state are functions of all tokens up to it and of the layer, so what belongs into each page is known:
the worker looks at everything that an attention of its kind would read, and asserts that it is right. No model runs.
Pages lie as vLLM allocates them: groups have the same memory, padding included. Source: vLLM 0.32,
v1/worker/kv_connector_model_runner_mixin.py, v1/worker/mamba_utils.py.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from engine_adapter.vllm_config import kind_of, layer_specs
from engines import models
from kvstore.block.layout import Attention
from paged_engine import bytes_of, hashes_of

SECONDS = 60
VOCAB = 997
GARBAGE = 0x5A


class _SecondRunner(VllmConfig):
    """What vLLM makes of VLLM_USE_V2_MODEL_RUNNER=1, where it finds a GPU."""

    use_v2_model_runner = True


class Writes:
    """vLLM's way to have K and V written into pages [pages, heads, tokens, K and V], as its GPU backends have them."""

    def do_kv_cache_update(
        self, _: Any, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: Any
    ) -> None:
        size = pages.shape[2]
        pages[slots // size, :, slots % size] = torch.cat([key, value], dim=2)


@dataclass
class Layer:
    """One layer's pages: [pages, heads, rows, bytes] as the engine sees them."""

    number: int
    table: int
    spec: Any
    pages: torch.Tensor
    context: tuple[int, int, int]
    """Which of how many ranks this is, and how many tokens each has in turn."""
    kind: Attention = field(init=False)
    window: int = field(init=False)

    def __post_init__(self) -> None:
        kind, self.window = kind_of(self.spec)
        assert kind is not None
        self.kind = kind
        self.row = self.spec.tokens_per_state if kind is not Attention.STATE else 0

    def seen_from(self, first: int) -> int:
        """The first token that the query at `first` sees."""
        if self.kind is Attention.SLIDING:
            return max(0, first - self.window + 1)
        return first // self.window * self.window if self.kind is Attention.CHUNKED else 0

    def rows(
        self, table: Sequence[int], first: int, stop: int, hashes: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of those of these tokens that this rank has: pages, places in them, and what belongs there."""
        rank, ranks, turn = self.context
        each = self.spec.block_size // self.row * ranks
        rows = np.arange(-(-first // self.row), stop // self.row)
        rows = rows[rows % each // turn % ranks == rank]
        at = rows % each // (turn * ranks) * turn + rows % turn
        right = bytes_of(hashes[(rows + 1) * self.row - 1], self.number, self.pages[0, :, 0].numel())
        return torch.tensor(table)[rows // each], torch.from_numpy(at), right

    def read(self, table: Sequence[int], first: int, hashes: np.ndarray) -> bool:
        """Whether all rows that the query at `first` sees are right."""
        pages, at, right = self.rows(table, self.seen_from(first), first, hashes)
        return bool((pages != 0).all()) and torch.equal(self.pages[pages, :, at].flatten(1), right)

    def write(self, table: Sequence[int], first: int, stop: int, hashes: np.ndarray) -> None:
        pages, at, made = self.rows(table, first // self.row * self.row, stop, hashes)
        self.pages[pages, :, at] = made.view(len(pages), *self.pages[0, :, 0].shape)

    def state(self, page: int) -> torch.Tensor:
        return self.pages[page].flatten()


class FormulaEngine:
    """A vLLM without a model. stages: of each pipeline stage the specs of its layers, which `ranks` workers have.
    proven: K and V of each token in a row, as they are on GPUs. context: how many ranks share a prompt's tokens, and
    how many in turn (decode context parallelism). options: of vLLM's `EngineArgs`."""

    layout = KVCacheLayout.LBNHC

    def __init__(
        self,
        stages: Sequence[dict[str, KVCacheSpec]],
        *,
        ranks: int = 1,
        proven: bool = False,
        context: tuple[int, int] = (1, 1),
        second_runner: bool = False,
        **options: Any,
    ) -> None:
        self.of_rank = [stage for stage in stages for _ in range(ranks)]
        specs, shards = [spec for stage in stages for spec in stage.values()], len(self.of_rank)
        block = max(spec.block_size for spec in specs)
        transfer = KVTransferConfig(**options.pop("transfer"))
        args = EngineArgs(
            block_size=block,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
            async_scheduling=False,
            **options,
        )
        self.vllm_config = config = args.create_engine_config()
        if second_runner:
            config.__class__ = _SecondRunner
        self.drafts = config.num_speculative_tokens
        cache, parallel = config.cache_config, config.parallel_config
        cache.block_size, cache.kv_cache_layout = block, self.layout.name
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = ranks, len(stages)
        parallel.world_size, parallel.distributed_executor_backend = shards, "mp"
        parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size = context
        states = [spec.block_size for spec in specs if kind_of(spec)[0] is Attention.STATE]
        cache.mamba_cache_mode, cache.mamba_block_size = ("align", states[0]) if states else ("none", None)
        with set_current_vllm_config(config):
            groups: list[KVCacheConfig] = kv_cache_utils.get_kv_cache_configs(config, self.of_rank, [1 << 30] * shards)
        scheduler_groups = kv_cache_utils.generate_scheduler_kv_cache_config(groups)
        cache.num_gpu_blocks = scheduler_groups.num_blocks
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(scheduler_groups, config)
        scheduler_groups.hash_block_size = sizes[1]
        hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_function)
        self._hasher = kv_cache_utils.get_request_block_hasher(sizes[1], hash_function)
        self.workers, self.layers = list[Any](), list[list[Layer]]()
        for rank in range(shards):  # as vLLM does it: workers are made first
            parallel.rank = rank
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, groups[rank])
            if proven:
                modules = {name: SimpleNamespace(impl=Writes()) for name in self.of_rank[rank]}
                config.compilation_config.static_forward_context.update(modules)
            self.workers.append(worker)
            self.layers.append(self._with_pages(rank, groups[rank]))
        self._groups = groups
        self.scheduler = Scheduler(
            config, scheduler_groups, StructuredOutputManager(config), block_size=sizes[0], hash_block_size=sizes[1]
        )
        self.connector: Any = self.scheduler.get_kv_connector()
        self.random = Random(0)
        self.streams: dict[str, tuple[list[int], np.ndarray]] = {}
        self.left: dict[str, tuple[int, int]] = {}
        """Of the last step of each request: the column of its state, and how many tokens were accepted."""
        self.over: list[str] = []
        self._aggregator = KVOutputAggregator(shards)
        self.wrong: dict[str, str] = {}
        """Of a step: requests that read what is not theirs."""
        self.brought, self.compared = 0, 0
        """Tokens that requests began with, the engine's own and loaded ones; and how often what they read was right."""

    def _with_pages(self, rank: int, groups: KVCacheConfig) -> list[Layer]:
        tensors = allocate_kv_cache(groups, torch.device("cpu"), self.layout)
        parallel, names = self.vllm_config.parallel_config, list(self.of_rank[rank])
        parallel.rank = rank  # each is a process of its own
        self.workers[rank].register_kv_caches(tensors)
        parallel.rank = 0
        ranks, turn = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
        return [
            Layer(
                64 * rank + names.index(name), table, spec, tensors[name].view(torch.uint8), (rank % ranks, ranks, turn)
            )
            for table, group in enumerate(groups.kv_cache_groups)
            for name, spec in layer_specs(group.kv_cache_spec, group.layer_names).items()
        ]

    def move_pages(self) -> None:
        """To other memory, as after a sleep; what was in them is gone, and the engine forgets it."""
        assert self.scheduler.reset_prefix_cache()
        for rank, (before, groups) in enumerate(zip(self.layers, self._groups, strict=True)):
            self.layers[rank] = self._with_pages(rank, groups)
            for layer in before:
                layer.pages.fill_(GARBAGE)

    @contextmanager
    def _as(self, worker: Any) -> Iterator[None]:
        kv_transfer_state._KV_CONNECTOR_AGENT = worker
        yield
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call again."""
        for worker in self.workers:
            worker.shutdown()
        self.workers = []
        self.connector.shutdown()

    # What its users do

    def add(self, name: str, prompt: Sequence[int], outputs: int = 1, *, weights: int = 0, lora: Any = None) -> None:
        """A request. Its answer is a function of the prompt and of the weights."""
        stream, hashes = list(prompt), [hashes_of(prompt, weights)]
        for _ in range(outputs + self.drafts + 1):
            stream.append(int(hashes[-1][-1] % VOCAB))
            hashes.append(hashes_of(stream[-1:], before=int(hashes[-1][-1])))
        self.streams[name] = (stream, np.concatenate(hashes))
        params = SamplingParams(max_tokens=outputs, ignore_eos=True)
        params.update_from_generation_config({}, VOCAB + 1)
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(prompt),
                sampling_params=params,
                pooling_params=None,
                lora_request=lora,
                block_hasher=self._hasher,
            )
        )

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self) -> None:
        """Until nothing is left to do, loads of requests that were given up included: vLLM steps for these, too."""
        deadline = time.monotonic() + SECONDS
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, "requests do not come to an end"
            self.step()

    # A step

    def step(self) -> None:
        """As vLLM's engine core does."""
        output = self.scheduler.schedule()
        self.brought += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        news = (new.req_id for new in output.scheduled_new_reqs)  # of the second runner resumed ones, too
        for name in (*output.scheduled_cached_reqs.resumed_req_ids, *news):
            self.left.pop(name, None)
        reports: list[KVConnectorOutput] = []
        self.wrong = {}
        orders = pickle.dumps(output.kv_connector_metadata)
        for rank, worker in enumerate(self.workers):
            if len(self.workers) > 1:  # of a process each
                output.kv_connector_metadata = pickle.loads(orders)
            with self._as(worker):
                if self.vllm_config.use_v2_model_runner:
                    self._prepare(output, self.layers[rank])
                worker.handle_preemptions(output.kv_connector_metadata)
                if not self.vllm_config.use_v2_model_runner:
                    self._prepare(output, self.layers[rank])
                hooks = KVConnectorModelRunnerMixin._get_kv_connector_output(output)
                with set_forward_context(None, self.vllm_config), hooks as report:
                    for name, tokens in output.num_scheduled_tokens.items():
                        self._compute(output, name, tokens, self.layers[rank])
                reports.append(report)
        sampled = {name: self._sampled(output, name) for name in output.num_scheduled_tokens}
        for layers in self.layers:
            self._accept(output, sampled, layers)
        names = list(sampled)
        made = self._aggregator.aggregate(
            [
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: at for at, name in enumerate(names)},
                    sampled_token_ids=[sampled[name] for name in names],
                    kv_connector_output=report,
                )
                for report in reports
            ]
        )
        for name, wrong in self.wrong.items():  # vLLM computes those again whose pages a load that failed left behind
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            assert made.kv_connector_output.invalid_block_ids & {page for table in tables for page in table}, wrong
        self.scheduler.update_from_output(output, made)
        drafted = [name for name in names if self.drafts and sampled[name] and name in self.scheduler.requests]
        if drafted:
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, [self._drafted(name) for name in drafted]))
        for name in [name for name in self.streams if name not in self.scheduler.requests]:
            self.over.append(name)
            self.left.pop(name, None)
            del self.streams[name]

    def _prepare(self, output: Any, layers: list[Layer]) -> None:
        for page in output.new_block_ids_to_zero or ():
            for layer in layers:
                layer.pages[page] = GARBAGE
        for copy in output.kv_cache_block_copies or ():
            for layer in layers:
                layer.pages[copy.dst_block_id] = layer.pages[copy.src_block_id].clone()

    def _first(self, output: Any, name: str) -> int:
        """How many tokens were computed before this step."""
        for new in output.scheduled_new_reqs:
            if new.req_id == name:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(name)])

    def _compute(self, output: Any, name: str, tokens: int, layers: list[Layer]) -> None:
        first, (stream, right) = self._first(output, name), self.streams[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        known = first + tokens - len(drafts)
        hashes = right[: first + tokens]
        if drafts and list(drafts) != stream[known : first + tokens]:
            hashes = hashes_of([*stream[:known], *drafts])
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for layer in layers:
            table = tables[layer.table]
            if layer.kind is Attention.STATE:
                self._advance(layer, table, name, first, tokens, len(drafts), hashes)
                continue
            if not layer.read(table, first, hashes):
                self.wrong[name] = f"{name}: layer {layer.number} at {first} is not its prefix's"
            self.compared += first > 0
            layer.write(table, first, first + tokens, hashes if name not in self.wrong else hashes[::-1])

    def _advance(
        self, layer: Layer, table: Sequence[int], name: str, first: int, tokens: int, drafts: int, hashes: np.ndarray
    ) -> None:
        """From the state behind the last token that was accepted to that of each draft, or to that of the last one."""
        size = layer.spec.block_size
        now = -(-(first + tokens) // size) - 1
        column, accepted = self.left.get(name, ((first - 1) // size, 1))
        if first:
            page = table[column + accepted - 1]
            held = layer.state(page)
            wanted = bytes_of(hashes[first - 1 : first], layer.number, held.numel())[0]
            assert page and torch.equal(held, wanted), f"{name}: the state at {first} is not its prefix's"
        for at in range(drafts + 1):
            stop = first + tokens - drafts + at
            page = table[now + at]
            layer.state(page)[:] = bytes_of(hashes[stop - 1 : stop], layer.number, layer.state(page).numel())[0]

    def _sampled(self, output: Any, name: str) -> list[int]:
        stream, _ = self.streams[name]
        request = self.scheduler.requests[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        stop = self._first(output, name) + output.num_scheduled_tokens[name] - len(drafts)
        if stop < request.num_tokens:
            return []
        right = 0
        while right < len(drafts) and drafts[right] == stream[stop + right]:
            right += 1
        return stream[stop : stop + right + 1]

    def _accept(self, output: Any, sampled: dict[str, list[int]], layers: list[Layer]) -> None:
        """vLLM's `postprocess_mamba`: a state at a block's end among accepted drafts is put where it belongs."""
        for name, tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            first, accepted = self._first(output, name), max(1, len(sampled[name]))
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for layer in layers:
                if layer.kind is not Attention.STATE:
                    continue
                size, table = layer.spec.block_size, tables[layer.table]
                now, running = -(-(first + tokens) // size) - 1, first + tokens - drafts
                aligned = (running + accepted - 1) // size * size
                if drafts and aligned >= running:
                    layer.state(table[aligned // size - 1])[:] = layer.state(table[now + aligned - running])
                self.left[name] = (now, accepted)

    def _drafted(self, name: str) -> list[int]:
        stream, _ = self.streams[name]
        at = self.scheduler.requests[name].num_tokens
        return [token if self.random.random() < 0.7 else (token + 1) % VOCAB for token in stream[at : at + self.drafts]]


class ScheduledEngine(FormulaEngine):
    """With `KvStoreConnector`. specs: of its layers. drafts: tokens drafted in each step."""

    def __init__(self, model: str, specs: dict[str, KVCacheSpec], url: str, random: Random, **options: Any) -> None:
        own = {"pages": 100, "budget": 256, "drafts": 0, "shards": 1, "stages": 1, "proven": False, "state_salt": 0}
        own |= {"layout": "LBNHC", "context": (1, 1), "second_runner": False}
        given = {name: value for name, value in options.items() if name not in own}
        own.update((name, value) for name, value in options.items() if name in own)
        each, named = len(specs) // own["stages"], list(specs.items())
        self.layout = KVCacheLayout[own["layout"]]
        speculative = {"method": "ngram", "num_speculative_tokens": own["drafts"], "prompt_lookup_max": 2}
        super().__init__(
            [dict(named[at : at + each]) for at in range(0, len(named), each)],
            ranks=own["shards"] // own["stages"],
            proven=own["proven"],
            context=own["context"],
            second_runner=own["second_runner"],
            transfer=models.connector(url, model="f0", codec="raw", **{**models.PATIENT, **given}),
            model=model,
            max_model_len=512,
            max_num_batched_tokens=own["budget"],
            max_num_seqs=6,
            num_gpu_blocks_override=own["pages"],
            speculative_config=speculative if own["drafts"] else None,
            **models.ADMITS_BY_THE_CHUNK,
        )
        self.random = random
        for layer in (layer for layers in self.layers for layer in layers if layer.kind is Attention.STATE):
            layer.number += 1000 * own["state_salt"]
        told = {}
        for rank, worker in enumerate(self.workers):
            with self._as(worker):
                told[divmod(rank, own["shards"] // own["stages"])] = worker.get_handshake_metadata()
        self.connector.set_xfer_handshake_metadata_pp_aware(told)
        self.half = self.connector.half
        assert self.half._refused is None, self.half._refused
        self.offered: list[tuple[str, int, int]] = []
        """By request: the engine's own tokens, and those that were promised behind them."""
        self.counts: list[Counter[str]] = []
        self._watch()
        self.evict: Callable[[int], object] = lambda blocks: None
        self.step()
        for worker in self.workers:
            assert worker._worker._opened(0, SECONDS) is not None

    def _watch(self) -> None:
        ask, block = self.connector.get_num_new_matched_tokens, self.scheduler.block_size
        has_states = any(layer.kind is Attention.STATE for layer in self.layers[0])

        def watched(request: Request, local: int) -> tuple[int | None, bool]:
            tokens, is_async = ask(request, local)
            if tokens:
                assert (local + tokens) % block == 0 or not has_states, "a boundary without a state"
                assert local + tokens < request.num_tokens, "one token is computed at least"
                self.offered.append((request.request_id, local, tokens))
            return tokens, is_async

        self.connector.get_num_new_matched_tokens = watched
        take = self.half.take_counts

        def taken() -> dict[str, Any]:
            counts = take()
            self.counts.append(Counter({name: count for name, count in counts.items() if isinstance(count, int)}))
            return counts

        self.half.take_counts = taken

    def total(self) -> Counter[str]:
        self.half.take_counts()
        self.counts = [sum(self.counts, Counter())]
        return self.counts[0]

    def settle(self) -> None:
        """Until nothing waits to be saved, and that is known."""
        deadline = time.monotonic() + SECONDS
        plan, audits = self.half._plan, self.half._audits
        while plan._offers or audits._under_way or any(one._worker._saves for one in self.workers):
            assert time.monotonic() < deadline, "saves do not come to an end"
            self.step()
            time.sleep(0.001)

    def forget(self) -> None:
        """The engine's own cache is empty from here on."""
        self.run()
        assert self.scheduler.reset_prefix_cache()

    def ask(self, name: str, prompt: Sequence[int], outputs: int = 1) -> int:
        """Alone, to its end. How many tokens the store brought."""
        before = len(self.offered)
        self.add(name, prompt, outputs)
        self.run()
        self.settle()
        return sum(tokens for _, _, tokens in self.offered[before:])
