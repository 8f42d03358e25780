"""Noise of single tokens, and what it says of a guess."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.sampling.noise import GumbelNoise, given_noise, gumbel_at


@given(seed=st.integers(0, 2**64 - 1), positions=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_it_is_the_noise_of_the_rows(seed: int, positions: list[int]) -> None:
    noise, tokens = GumbelNoise(seed, 97), list(range(97))
    for position in positions:
        found = gumbel_at(seed, [position] * 97, tokens)
        assert found.dtype == np.float32
        assert found.tobytes() == noise.row(position).numpy().tobytes()


def test_positions_and_tokens_go_in_pairs() -> None:
    noise = GumbelNoise(5, 60_000)
    pairs = [(3, 50_001), (2**40, 2), (0, 0), (3, 7)]
    found = gumbel_at(5, [position for position, _ in pairs], [token for _, token in pairs])
    assert found.tolist() == [float(noise.row(position)[token]) for position, token in pairs]
    assert gumbel_at(5, [], []).shape == (0,)


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.9])
def test_the_formula_by_simulation(probability: float) -> None:
    """Others share out what is left as they like: only their sum counts."""
    rng = np.random.default_rng(3)
    others = rng.dirichlet(np.ones(20)) * (1 - probability)
    noise = rng.gumbel(size=(40_000, 21))
    won = (np.log([probability, *others]) + noise).argmax(axis=1) == 0
    said = np.exp(given_noise(np.full(len(noise), probability), noise[:, 0]))
    order = np.argsort(said)
    for part in np.array_split(order, 8):  # as likely as was said, whether that is little or much
        assert won[part].mean() == pytest.approx(said[part].mean(), abs=0.025)
    assert said.mean() == pytest.approx(probability, abs=0.01)
