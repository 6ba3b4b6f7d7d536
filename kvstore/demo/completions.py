"""A model of transformers behind OpenAI's completions, as far as `kvstore prove` asks: token ids in, greedy tokens and
their log probabilities out. With a store by `PrefixCache`, without one by the model's own `generate`.

    python -P -m kvstore.demo.completions --model DIR --port N [--store URL --codec NAME]
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import kvstore
from engine_adapter.hf_cache import PrefixCache

MOST_BODY_BYTES = 16 << 20
DEADLINE_MS = 10_000


class ServedModel:
    """A model, one request at a time."""

    def __init__(self, folder: str, store: str, codec: str) -> None:
        self.name = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._lock = threading.Lock()
        self._cache: PrefixCache | None = None
        if store:
            named = None if codec == "auto" else codec
            self._cache = PrefixCache(self._model, kvstore.open(store), codec=named, deadline_ms=DEADLINE_MS)
            self._cache.audit = 0

    @torch.no_grad()
    def complete(self, tokens: list[int], count: int) -> dict[str, Any]:
        """As OpenAI has it, with the most probable two of each token."""
        how: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        how |= {"output_logits": True, "return_dict_in_generate": True}
        with self._lock:
            if self._cache is None:
                ids = torch.tensor([tokens], device=self._model.device)
                told = self._model.generate(ids, attention_mask=torch.ones_like(ids), **how)
                hits: dict[str, int] = {}
            else:
                told = self._cache.generate(tokens, **how)
                hits = {str(tier): count for tier, count in self._cache.report.account.hits.items()}
        chosen, logprobs, tops = told.sequences[0, len(tokens) :].tolist(), [], []
        for token, logits in zip(chosen, told.logits, strict=True):
            numbers = torch.log_softmax(logits[0].float(), -1)
            best = numbers.topk(2)
            logprobs.append(float(numbers[token]))
            tops.append({str(at): value for at, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)})
        found = {"tokens": [str(token) for token in chosen], "token_logprobs": logprobs, "top_logprobs": tops}
        usage = {"prompt_tokens_details": {"cached_tokens": sum(hits.values())}}
        return {"choices": [{"logprobs": found}], "usage": usage, "kv_transfer_params": {"kvstore": {"hits": hits}}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: ServedModel

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": self.model.name}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if length > MOST_BODY_BYTES:
            self._answer(413, {})
            return
        body = json.loads(self.rfile.read(length) or b"{}")
        if self.path == "/v1/completions":
            self._answer(200, self.model.complete(body["prompt"], body["max_tokens"]))
        else:  # it has neither a cache of its own nor a tokenizer
            self._answer(200 if self.path == "/reset_prefix_cache" else 404, {})

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, status: int, told: object) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("--model", "--port", "--store", "--codec"):
        options.add_argument(name, default="")
    given = options.parse_args()
    _Handler.model = ServedModel(given.model, given.store, given.codec)
    ThreadingHTTPServer(("127.0.0.1", int(given.port)), _Handler).serve_forever()


if __name__ == "__main__":
    main()
