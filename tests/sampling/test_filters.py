"""Rows that are cut together are cut as each is alone, and choices are the same together and one by one."""

from typing import Any

import pytest
import torch

from offspec.core.config import SamplingParams
from offspec.sampling.filters import border, borders
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_kernels.gumbel_argmax import keep_above

V = 700
FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_p": 0.9999999999},
    {"top_k": 7},
    {"top_k": 7, "top_p": 0.6},
    {"min_p": 0.1},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.02},
]


def rows(count: int, ties: bool) -> torch.Tensor:
    """[n, V] float32, some tokens impossible."""
    scores = 2 * torch.randn(count, V, generator=torch.Generator().manual_seed(count))
    if ties:
        scores = scores.round()
    scores[:, ::5] = -torch.inf
    return scores


@pytest.mark.parametrize("filters", FILTERS)
def test_rows_are_cut_together_as_one_by_one(filters: dict[str, Any], device: torch.device) -> None:
    params = SamplingParams(temperature=1.0, **filters)
    for count, ties in ((2, True), (4, False), (9, True)):
        scores = rows(count, ties)
        least, last_tie = borders(scores.to(device), params)
        assert last_tie is not None
        for row, *cut in zip(scores, least.cpu(), last_tie.cpu(), strict=True):
            expected = keep_above(row.clone(), *border(row, params))
            assert torch.equal(keep_above(row.clone(), *cut), expected)
            assert expected.isfinite().any()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "seed": 1, "top_p": 0.8, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
)
def test_choices_of_many_nodes_are_those_of_each(params: dict[str, Any], device: torch.device) -> None:
    ours = LogitsProcessor(SamplingParams(**params), V, [3, 4, 3], device)
    noise = GumbelNoise(5, V, device) if ours.uses_noise else None
    logits, paths = rows(6, False).to(device), [[], [3], [3, 4], [3], [9], [9, 3]]
    positions = [11 + len(path) for path in paths]
    together = ours.choices(logits, paths, noise, positions)
    for choice, row, path, position in zip(together, logits, paths, positions, strict=True):
        assert ours.settled(choice, row) == ours.choose(row, path, noise, position)
