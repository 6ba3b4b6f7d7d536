"""Trains the small model that `kvstore demo` and `kvstore bench codec` use, and writes it into the package.

    nice python benchmarks/train_demo_model.py [--steps 2400] [--out kvstore/demo/trained]     half an hour of one core

Windows are short at first, because they are cheap, and in the last third many have the whole 4,096 bytes. The same seed
gives the same windows; sums of floats, and so the last digits, depend on the machine.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from kv_bench import script
from kv_bench.corpus import read_sources, windows

POSITIONS = 4096
TIED = "lm_head.weight"
"""The same memory as the embeddings: it is not kept a second time."""
SEED, STEP_BYTES = 1, 4096
BUCKETS = (0, 512, 1024, 2048, 3072, POSITIONS)
EVALUATED_WINDOWS = 64

# Up to this share of all steps: window lengths, and how often each is drawn.
PHASES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.25, {256: 1.0}),
    (0.70, {512: 1.0}),
    (1.00, {512: 0.40, 2048: 0.25, 4096: 0.35}),
)
PEAK_RATE, LAST_RATE_SHARE, WARM_UP_STEPS = 3e-3, 0.05, 60
BETAS, WEIGHT_DECAY, LARGEST_GRADIENT = (0.9, 0.95), 0.05, 1.0

FOLDER = Path(__file__).resolve().parent.parent / "kvstore" / "demo" / "trained"
"""What is shipped; its config.json says the model's shape."""


def main() -> None:
    options = script.options(__doc__, out=str(FOLDER), steps=2400)
    config = json.loads((FOLDER / "config.json").read_text())
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    text = _stream(SEED)
    model: Any = LlamaForCausalLM(LlamaConfig(**config)).float()
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    print(f"{len(text):,} bytes to train on, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    began, losses = time.monotonic(), []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, options.steps)
        batch = _batch(text, SEED, step, options.steps)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == options.steps:
            spent = time.monotonic() - began
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1} of {options.steps}: {recent:.3f} nats/byte, {spent:.0f} s", flush=True)
    _write(Path(options.out), options.steps, model, config, text, spent)


def _stream(seed: int) -> np.ndarray:
    sources = read_sources(held_out=False)
    order = np.random.default_rng(seed).permutation(len(sources))
    return np.frombuffer(b"".join(sources[number].text for number in order), np.uint8)


def _batch(text: np.ndarray, seed: int, step: int, steps: int) -> torch.Tensor:
    """[windows, length + 1]: drawn from seed and step alone."""
    random = np.random.default_rng((seed, step))
    lengths = next(lengths for end, lengths in PHASES if step < end * steps)
    length = int(random.choice(list(lengths), p=list(lengths.values())))
    starts = random.integers(0, len(text) - length - 1, STEP_BYTES // length)
    return torch.from_numpy(np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64))


def _rate(step: int, steps: int) -> float:
    if step < WARM_UP_STEPS:
        return PEAK_RATE * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return PEAK_RATE * (LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * (1 + cos(pi * done)) / 2)


def _write(out: Path, steps: int, model: Any, config: dict[str, Any], text: np.ndarray, seconds: float) -> None:
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items() if name != TIED}
    model.load_state_dict(state, strict=False)  # what is judged is what is saved
    weights = save({name: tensor.contiguous() for name, tensor in state.items()}, {"format": "pt"})
    held_out = read_sources(held_out=True)
    origin = {
        "script": "benchmarks/train_demo_model.py",
        "text": f"the standard library of Python {platform.python_version()}, without the folders that "
        "kvstore/demo/corpus.py leaves out, and without one file of twenty",
        "text_licence": "PSF-2.0 (https://docs.python.org/3/license.html)",
        "text_bytes": len(text),
        "text_sha256": sha256(text.tobytes()).hexdigest(),
        "seed": SEED,
        "steps": steps,
        "bytes_seen": steps * STEP_BYTES,
        "seconds": round(seconds),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "held_out_bytes": sum(len(source.text) for source in held_out),
        "held_out_nats_per_byte": held_out_loss(model, windows(held_out, POSITIONS, EVALUATED_WINDOWS)),
        "sha256": sha256(weights).hexdigest(),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.safetensors").write_bytes(weights)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "ORIGIN.json").write_text(json.dumps(origin, indent=2) + "\n")
    print(json.dumps(origin, indent=2))


def held_out_loss(model: Any, texts: Sequence[bytes]) -> dict[str, float]:
    """Nats per byte by position in texts of 4,096 bytes; and of their ends, with and without what comes before them."""

    def losses(last: int) -> torch.Tensor:
        found = []
        for text in texts:
            tokens = torch.tensor([list(text[-last:])])
            with torch.inference_mode():
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0].float()
            found.append(F.cross_entropy(logits, tokens[0, 1:], reduction="none"))
        return torch.stack(found)

    whole = losses(POSITIONS)
    pieces = {f"{start} to {end}": whole[:, max(0, start - 1) : end - 1] for start, end in pairwise(BUCKETS)}
    pieces |= {"all": whole, "last 512": whole[:, -511:], "last 512 without what is before them": losses(512)}
    return {name: round(float(piece.mean()), 4) for name, piece in pieces.items()}


if __name__ == "__main__":
    script.run(main)
