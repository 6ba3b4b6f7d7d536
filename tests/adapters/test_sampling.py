"""Choosing tokens."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.hf.sampling import Sampling, choose
from kvstore.block.errors import BadInput

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))


def test_the_most_likely_token() -> None:
    assert choose(LOGITS, None).tolist() == [0, 3]


def test_draws_follow_the_probabilities() -> None:
    sampling = Sampling(generator=torch.Generator().manual_seed(3))
    draws = torch.stack([choose(LOGITS, sampling) for _ in range(2000)])
    share = torch.bincount(draws[:, 0], minlength=4) / 2000
    assert torch.allclose(share, LOGITS[0].exp(), atol=0.05)  # four standard deviations of a share of one half


def test_top_p_keeps_the_smallest_set_that_has_the_probability() -> None:
    sampling = Sampling(top_p=0.75, generator=torch.Generator().manual_seed(3))
    draws = torch.stack([choose(LOGITS, sampling) for _ in range(300)])
    assert set(draws[:, 0].tolist()) == {0, 1} and set(draws[:, 1].tolist()) == {2, 3}
    narrow = Sampling(top_p=1e-6)
    assert choose(LOGITS, narrow).tolist() == [0, 3], "one token is always left"


def test_temperature_sharpens() -> None:
    cold = Sampling(temperature=0.01, generator=torch.Generator().manual_seed(3))
    assert {tuple(choose(LOGITS, cold).tolist()) for _ in range(50)} == {(0, 3)}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": -1.0}])
def test_what_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="leave sampling out"):
        Sampling(**options)
