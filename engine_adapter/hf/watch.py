"""Which KV a model computes at this moment (its identity), and whether that changed since the last look.

    1. every request   a look at the model's state (`state.ModelLook`): if nothing changed, the identity stands
    2. a change, or too long since the last run   the probe is run (`probe`); its digest is part of the identity
    3. code that may change unseen (hooks, patched forwards)   the probe is run for every request

Must never say that nothing changed because it did not look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from logging import getLogger
from typing import Any, TypeVar

import torch

from engine_adapter.hf.layers import ModelCall
from engine_adapter.hf.model import check_model, fingerprint, namespace_config, refusal, rope_switch
from engine_adapter.hf.probe import Probe
from engine_adapter.hf.state import ModelLook, WeightSampler, described, is_opaque
from kvstore.block.errors import BadInput

PROBE_SECONDS = 5.0
"""A digest is trusted for this long, or for 100 times the probe's duration if that is longer: it costs at most 1 %."""

T = TypeVar("T")
_log = getLogger(__name__)


@dataclass(frozen=True)
class ModelIdentity:
    """weights: their fingerprint. config: fields of the namespace. is_plain: nothing but weights and configuration
    decides what the model computes."""

    weights: str
    config: tuple[tuple[str, str], ...]
    is_plain: bool


class ModelWatch:
    """Looks at one model for one cache. call: its forward passes. kinds: what its caches hold."""

    def __init__(self, model: torch.nn.Module, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `BadInput`, with one line, for a model that cannot be served."""
        self._model = model
        self._clock = clock
        self.probes = 0
        self.generation = 0
        """Counts the changes that were found: a request of an earlier generation began with another model."""
        self._sampler = WeightSampler(model)
        self._digest: str | None = None
        self._try()
        self._check_digest()
        self._weights = fingerprint(model)
        self._seen = ModelLook(model, self._sampler)

    def identity(self) -> ModelIdentity:
        """As of now. Raises `BadInput` where the model cannot be served any longer."""
        is_same_state, is_same_weights = self._seen.is_same_state(), self._seen.is_same_weights()
        is_same = is_same_state and is_same_weights
        if not is_same or self.is_opaque or self._clock() >= self._good_until:
            self._look_again(is_same_state, is_same_weights)
        fields = namespace_config(self._model)
        if self._digest is not None:
            fields["computes"] = self._digest
        if self._text:
            fields["state"] = blake2b(self._text.encode(), digest_size=16, person=b"kv-state-v1").hexdigest()
        return ModelIdentity(self._weights, tuple(fields.items()), not self._text)

    def is_still(self, generation: int) -> bool:
        """Whether a look finds the model as it was in that generation; and a run of the probe, if code may change
        unseen."""
        if generation != self.generation or not (self._seen.is_same_state() and self._seen.is_same_weights()):
            return False
        try:
            return not self.is_opaque or self._probe.digest() == self._digest
        except BadInput:
            return False

    def _look_again(self, is_same_state: bool, is_same_weights: bool) -> None:
        before = self._digest
        if not (is_same_state and is_same_weights):
            self._try()
        elif self._digest is not None:
            self._digest = self._probed(self._probe.digest)
        if not is_same_weights or (is_same_state and self._digest != before):
            self._weights = fingerprint(self._model)
        if not (is_same_state and is_same_weights) or self._digest != before:
            self.generation += 1
        self._check_digest()
        self._seen = ModelLook(self._model, self._sampler)

    def _try(self) -> None:
        check_model(self._model)
        self.device: torch.device = next(self._model.parameters()).device
        self.call = ModelCall(self._model)
        self.is_opaque = is_opaque(self._model)
        self.rope = rope_switch(self._model)
        config: Any = self._model.config
        self.picture_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        self._probe = Probe(self.call, self._model)
        self._text = described(self._model)
        self.kinds, self._digest = self._probed(self._probe.trial)

    def _probed(self, run: Callable[[], T]) -> T:
        start = self._clock()
        self.probes += 1
        result = run()
        now = self._clock()
        self._good_until = now + max(PROBE_SECONDS, 100 * (now - start))
        return result

    def _check_digest(self) -> None:
        says = "its KV has other last bits in every run, so"
        if self._digest is None and self._text:
            config: Any = self._model.config
            raise refusal(config.model_type, f"{says} what adapters, hooks or patches change cannot be told")
        if self._digest is None:
            _log.warning("of the model: %s it is identified by weights and configuration alone", says)
