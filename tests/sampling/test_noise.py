"""The noise: the published generator, the right distribution, and nothing that depends on the asking."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from offspec.sampling.noise import GumbelNoise, request_key
from offspec_kernels.noise import gumbel, philox

# Known answers of Random123 for philox4x32-10: counter, key, output.
KNOWN = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

words = st.integers(0, 2**32 - 1)
quick = settings(max_examples=25, deadline=None)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator with Python's integers, as the paper defines it."""
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


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == expected


@quick
@given(st.lists(words, min_size=4, max_size=4), st.tuples(words, words))
def test_philox_equals_plain_integers(counter: list[int], key: tuple[int, int]) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert [int(word) for word in philox((c0, c1, c2, c3), key)] == scalar_philox(counter, list(key))


@quick
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 10))
def test_bits_are_the_documented_words(seed: int, position: int, token: int) -> None:
    bits = GumbelNoise(seed, 11).bits(position)
    counter = [token // 4, position % 2**32, position >> 32, 0x47756D62]
    assert bits.shape == (11,)
    assert int(bits[token]) == scalar_philox(counter, [seed % 2**32, seed >> 32])[token % 4]


def test_a_row_does_not_depend_on_the_order_of_asking() -> None:
    positions = [5, 0, 2**33, 7, 5, 1]
    fresh = [GumbelNoise(3, 100).row(position).clone() for position in positions]
    noise = GumbelNoise(3, 100)
    assert torch.equal(noise.rows(positions), torch.stack(fresh))
    assert torch.equal(noise.rows(positions[::-1]), torch.stack(fresh[::-1]))
    assert noise.rows([]).shape == (0, 100)


def test_a_row_does_not_depend_on_what_the_cache_dropped() -> None:
    noise = GumbelNoise(3, 10)
    first = noise.row(0).clone()
    for position in range(1, 200):
        noise.row(position)
    assert len(noise._rows) * 4 * 10 <= noise.cache_bytes
    assert torch.equal(noise.row(0), first)


def test_a_row_in_use_is_made_once() -> None:
    noise = GumbelNoise(3, 10)
    kept = noise.row(4)
    for position in range(100, 200):
        noise.row(position)
        assert noise.row(4) is kept


def test_a_larger_vocabulary_only_adds_tokens() -> None:
    large = GumbelNoise(9, 40_001)
    for size in (1, 77, 16_384, 16_385, 20_003):
        assert torch.equal(large.row(6)[:size], GumbelNoise(9, size).row(6))
    assert torch.equal(gumbel(large.bits(6)), large.row(6))
    bits = int(large.bits(6)[20_001])  # past the first piece of the row
    assert bits == scalar_philox([5000, 6, 0, 0x47756D62], [9, 0])[1]


def test_seeds_and_positions_differ() -> None:
    rows = [
        GumbelNoise(seed, 64).row(position) for seed in (0, 1, 2**32, 2**64 - 1) for position in (0, 1, 2**32)
    ]
    assert len({tuple(row.tolist()) for row in rows}) == 12


def test_the_distribution_is_gumbel() -> None:
    row = GumbelNoise(2026, 20_000).row(3).double().numpy()
    assert stats.kstest(row, "gumbel_r").pvalue > 0.01
    # Across positions too, at one token.
    noise = GumbelNoise(2026, 1)
    column = [float(noise.row(position)) for position in range(2000)]
    assert stats.kstest(column, "gumbel_r").pvalue > 0.01


def test_the_right_tail_is_populated() -> None:
    """The tokens that win live there: the top 1 in 1000 follows an exponential of rate 1."""
    values = torch.cat([GumbelNoise(seed, 50_000).row(0) for seed in range(10)]).double()
    border = -math.log(-math.log1p(-1e-3))
    tail = values[values > border]
    assert stats.binomtest(len(tail), len(values), 1e-3).pvalue > 0.01
    assert stats.kstest((tail - border).numpy(), "expon", method="asymp").pvalue > 0.01


def test_neighbours_are_uncorrelated() -> None:
    noise = GumbelNoise(11, 20_000)
    left, right = noise.row(8), noise.row(9)
    assert stats.pearsonr(left, right).pvalue > 0.01
    assert stats.pearsonr(left[:-1], left[1:]).pvalue > 0.01


def test_extreme_bits_are_finite_and_exact() -> None:
    bits = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    expected = [-math.log(-math.log1p(-(b + 0.5) * 2.0**-32)) for b in bits.tolist()]
    assert gumbel(bits).dtype == torch.float32
    assert gumbel(bits).tolist() == torch.tensor(expected).tolist()


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


def test_gumbel_decreases_with_the_bits() -> None:
    bits = torch.arange(0, 2**32, 4_294_967)
    assert (gumbel(bits).diff() <= 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_row() -> None:
    for seed in range(8):
        expected = GumbelNoise(seed, 200_000).row(seed)
        assert torch.equal(GumbelNoise(seed, 200_000, "cuda").row(seed).cpu(), expected)


def test_a_request_s_key_depends_on_its_seed_and_every_token_of_its_prompt() -> None:
    prompts = [[], [0], [0, 0], [1, 2], [2, 1], [258]]
    keys = [request_key(seed, ids) for seed in (0, 1, 2**64 - 1) for ids in prompts]
    assert len(set(keys)) == len(keys) and all(0 <= key < 2**64 for key in keys)
    assert keys[3] == request_key(0, (1, 2)), "of ids, whatever holds them"


@pytest.mark.gpu
def test_a_table_of_rows_serves_positions_again_and_again() -> None:
    noise, plain = GumbelNoise(7, 300, "cuda"), GumbelNoise(7, 300)
    assert plain.table([3]) is None and noise.table([]) is None
    for positions in ([5, 6, 9], [9, 5], [10, 6, 7, 8, 5], [69, 70, 71], [6, 5], [5, 5 + 200], [300]):
        table = noise.table(positions)
        assert table is not None
        for position in positions:
            assert torch.equal(table[position % len(table)].cpu(), plain.row(position))
    assert table is not None and len(table) == 256, "as many rows as positions lie apart"
