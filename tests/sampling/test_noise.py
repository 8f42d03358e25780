"""The noise: the published generator, the right distribution, and independence from the order of requests."""

import math
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from offspec.sampling.noise import (
    GumbelNoise,
    gumbel_at,
    log_prob_given_noise,
    request_key,
    uniform_stream,
    uniforms,
)
from offspec_kernels.noise import gumbel, philox, uniform_bits

# Known answers of Random123 for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
quick = settings(max_examples=25, deadline=None)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator with Python's integers, as defined in the paper."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def bits_of(seed: int, position: int, size: int) -> torch.Tensor:
    """The uniform bits of a row of noise."""
    return uniform_bits(seed, position, torch.arange((size + 3) // 4))[:size]


def test_philox_matches_published_answers() -> None:
    for counter, key, expected in KNOWN:
        c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
        assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == expected
        assert tuple(scalar_philox([*counter], [*key])) == expected


@quick
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 10))
def test_bits_and_noise_match_the_documentation(seed: int, position: int, token: int) -> None:
    noise = GumbelNoise(seed, 11)
    bits = bits_of(seed, position, 11)
    counter = [token // 4, position % 2**32, position >> 32, 0x47756D62]
    assert bits.shape == (11,)
    assert int(bits[token]) == scalar_philox(counter, [seed % 2**32, seed >> 32])[token % 4]
    found = gumbel_at(seed, [position] * 11, range(11))
    assert found.dtype == np.float32 and found.tobytes() == noise.row(position).numpy().tobytes()


def test_positions_and_tokens_are_paired() -> None:
    noise = GumbelNoise(5, 60_000)
    pairs = [(3, 50_001), (2**40, 2), (0, 0), (3, 7)]
    found = gumbel_at(5, [position for position, _ in pairs], [token for _, token in pairs])
    assert found.tolist() == [float(noise.row(position)[token]) for position, token in pairs]
    assert gumbel_at(5, [], []).shape == (0,)


def test_rows_do_not_depend_on_order_or_eviction() -> None:
    positions = [5, 0, 2**33, 7, 5, 1]
    fresh = [GumbelNoise(3, 100).row(position).clone() for position in positions]
    noise = GumbelNoise(3, 100)
    assert torch.equal(torch.stack([*map(noise.row, positions)]), torch.stack(fresh))
    kept, dropped = noise.row(5), noise.row(7)
    for position in range(100, 300):
        noise.row(position)
        assert noise.row(5) is kept, "a row in use is computed once"
    assert noise.row(7) is not dropped, "not all rows are kept"
    assert torch.equal(torch.stack([*map(noise.row, positions[::-1])]), torch.stack(fresh[::-1]))


def test_larger_vocabulary_only_adds_tokens() -> None:
    large = GumbelNoise(9, 40_001)
    for size in (1, 77, 16_384, 16_385, 20_003):
        assert torch.equal(large.row(6)[:size], GumbelNoise(9, size).row(6))
    assert torch.equal(gumbel(bits_of(9, 6, 40_001)), large.row(6))
    bits = int(bits_of(9, 6, 40_001)[20_001])  # beyond the first block of the row
    assert bits == scalar_philox([5000, 6, 0, 0x47756D62], [9, 0])[1]


def test_distribution_is_gumbel() -> None:
    """Along a row and across positions; also in the right tail, where the winning tokens are."""
    noise = GumbelNoise(2026, 20_000)
    left, right = noise.row(3).double(), noise.row(4).double()
    column = gumbel_at(2026, range(2000), [0] * 2000).astype(float)
    for sample in (left.numpy(), column):
        assert stats.kstest(sample, "gumbel_r").pvalue > 0.01
    for one, other in ((left, right), (left[:-1], left[1:])):
        assert stats.pearsonr(one, other).pvalue > 0.01, "neighbours are uncorrelated"
    values = torch.cat([GumbelNoise(seed, 50_000).row(0) for seed in range(10)]).double()
    border = -math.log(-math.log1p(-1e-3))
    tail = values[values > border]  # the top 1 in 1000, which follows an exponential of rate 1
    assert stats.binomtest(len(tail), len(values), 1e-3).pvalue > 0.01
    assert stats.kstest((tail - border).numpy(), "expon", method="asymp").pvalue > 0.01


@quick
@given(st.integers(0, 2**32 - 1))
def test_gumbel_is_the_rounded_formula(start: int) -> None:
    # Spread over the whole range, dense on both sides, near 0 where the logarithm changes sign.
    ends = torch.arange(200)
    middle = int(-math.expm1(-1.0) * 2**32) + ends - 100
    bits = torch.cat([(start + ends * 21_474_836) % 2**32, ends, 2**32 - 1 - ends, middle])
    w = (bits.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-w))
    assert ((gumbel(bits).double() - exact).abs() <= exact.abs() * 2.0**-24 + 1e-15).all()


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.9])
def test_pick_probability_by_simulation(probability: float) -> None:
    """The other tokens may share the remainder in any way: only their sum matters."""
    rng = np.random.default_rng(3)
    others = rng.dirichlet(np.ones(20)) * (1 - probability)
    noise = rng.gumbel(size=(40_000, 21))
    won = (np.log([probability, *others]) + noise).argmax(axis=1) == 0
    said = np.exp(log_prob_given_noise(np.full(len(noise), probability), noise[:, 0]))
    for part in np.array_split(np.argsort(said), 8):  # as likely as predicted, whether that is little or much
        assert won[part].mean() == pytest.approx(said[part].mean(), abs=0.025)
    assert said.mean() == pytest.approx(probability, abs=0.01)


def test_no_uniform_number_is_used_twice() -> None:
    """Draws and tests, seeds, positions: each has its own numbers, strictly between 0 and 1."""
    names = [(seed, purpose, place) for seed in (0, 1) for purpose in ("draw", "test") for place in range(5)]
    numbers = torch.cat([uniforms(seed, purpose, place, 100) for seed, purpose, place in names])
    assert len(numbers.unique()) == len(numbers) == 2000
    assert numbers.min() > 0 and numbers.max() < 1 and abs(float(numbers.mean()) - 0.5) < 0.03
    assert list(islice(uniform_stream(1, "test", 4), 100)) == uniforms(1, "test", 4, 100).tolist()


def test_key_depends_on_seed_and_prompt() -> None:
    prompts = [[], [0], [0, 0], [1, 2], [2, 1], [258]]
    keys = [request_key(seed, ids) for seed in (0, 1, 2**64 - 1) for ids in prompts]
    assert len(set(keys)) == len(keys) and all(0 <= key < 2**64 for key in keys)
    assert keys[3] == request_key(0, (1, 2)), "of ids, whatever holds them"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_rows_equal_cpu_rows() -> None:
    for seed in range(8):
        expected = GumbelNoise(seed, 200_000).row(seed)
        assert torch.equal(GumbelNoise(seed, 200_000, "cuda").row(seed).cpu(), expected)


@pytest.mark.gpu
def test_table_of_rows_is_reused() -> None:
    noise, plain = GumbelNoise(7, 300, "cuda"), GumbelNoise(7, 300)
    assert plain.table([3]) is None and noise.table([]) is None
    for positions in ([5, 6, 9], [9, 5], [10, 6, 7, 8, 5], [69, 70, 71], [6, 5], [5, 5 + 200], [300]):
        table = noise.table(positions)
        assert table is not None
        for position in positions:
            assert torch.equal(table[position % len(table)].cpu(), plain.row(position))
    assert table is not None and len(table) == 256, "as many rows as positions lie apart"
