"""Every path of gumbel_argmax picks the reference's tokens, with the reference's bits."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec.sampling.noise import GumbelNoise
from offspec_kernels.backend import Backend
from offspec_kernels.gumbel_argmax import ArgmaxResult, gumbel_argmax
from tests.support.kernel_device import device_of, examples, moved, needs_compiled_kernels
from tests.support.poison import poisoned

PATHS: list[Backend] = ["eager", "triton"]
quick = settings(max_examples=examples(20, compiled=20), deadline=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
sizes = st.sampled_from([1, 2, 5, 1000, 1023, 1024, 1025, 2500])


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    with poisoned():
        yield


def rows_of(seed: int, count: int, size: int, dtype: torch.dtype = torch.float32, stride: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, size + stride, generator=generator) * 3).to(dtype)[:, :size]


def same(got: ArgmaxResult, expected: ArgmaxResult) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0, equal_nan=True)


def agree(path: Backend, logits: Tensor, device: str | None = None, **arguments: Any) -> ArgmaxResult:
    """The picks of `path` on `device`, compared with the reference's."""
    device = device or device_of(path).type
    expected = gumbel_argmax(logits, path="reference", **arguments)
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    there_logits, before = moved(logits, device), logits.clone()
    got = gumbel_argmax(there_logits, path=path, **there)
    assert torch.equal(there_logits.cpu(), before), "the logits are left as they are"
    assert got.token.device.type == device
    same(got, expected)
    return got


def borders(logits: Tensor, temperature: float, rank: int) -> Tensor:
    """[N]: the score that `rank` others reach or exceed."""
    scores = logits.float() / temperature
    return scores.sort(descending=True).values[:, min(rank, scores.shape[1] - 1)].contiguous()


@pytest.mark.parametrize("path", PATHS)
@quick
@given(data=st.data(), dtype=dtypes, size=sizes, seed=st.integers(0, 2**64 - 1))
def test_every_path_equals_the_reference(
    path: Backend, data: st.DataObject, dtype: torch.dtype, size: int, seed: int
) -> None:
    count = data.draw(st.integers(0, 5))
    logits = rows_of(seed % 1000, count, size, dtype, stride=data.draw(st.sampled_from([0, 3])))
    temperature = data.draw(st.sampled_from([1.0, 0.7, 1e-20, 3.1]))
    arguments: dict[str, Any] = {"temperature": temperature}
    if data.draw(st.booleans()):
        places = st.one_of(st.integers(0, 3), st.integers(0, 2**62))
        arguments |= {"seed": seed, "positions": data.draw(st.lists(places, min_size=count, max_size=count))}
    if data.draw(st.booleans()):
        arguments["min_score"] = borders(logits, temperature, data.draw(st.sampled_from([0, 3, 400])))
        if data.draw(st.booleans()):
            arguments["last_tie"] = torch.arange(count) * (size // 3)
    agree(path, logits, **arguments)


@pytest.mark.parametrize("path", PATHS)
def test_many_rows_share_a_position(path: Backend) -> None:
    """More rows of a position than a program takes, and positions in no order."""
    positions = [7] * 19 + [2**40, 0, 7, 0]
    agree(path, rows_of(1, 23, 70), seed=2**63, positions=positions, temperature=0.8)
    agree(path, rows_of(1, 23, 70))


@pytest.mark.parametrize("path", PATHS)
def test_the_lowest_id_wins_a_tie(path: Backend) -> None:
    """The lowest id of equals, within a block and across blocks, both zeros being equal."""
    logits = torch.full((4, 3000), -5.0)
    logits[0, [2999, 1500, 1400, 1399]] = 2.0
    logits[1, [2048, 30]] = torch.tensor([0.0, -0.0])
    logits[2, 17] = 4.0
    logits[3] = -math.inf
    picks = agree(path, logits)
    assert picks.token.tolist() == [1399, 30, 17, 0]
    assert picks.second.tolist() == [2.0, 0.0, -5.0, -math.inf]


@pytest.mark.parametrize("path", PATHS)
def test_ties_at_the_border_are_cut_by_id(path: Backend) -> None:
    logits = torch.zeros(3, 2000)
    logits[:, [3, 500, 1500]] = 1.0
    logits[:, 1900] = 9.0
    least, last = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([500, 2, 1999])
    filtered = {"seed": 5, "positions": [1, 1, 1], "min_score": least, "last_tie": last}
    alone = agree(path, logits, **filtered)
    assert alone.token[2] == 1900 and alone.second[2] == -math.inf
    logits[:, 1900] = -1.0
    picks = agree(path, logits, **filtered)
    assert picks.token[0] in (3, 500) and picks.second[0] > -math.inf
    assert picks.best.tolist()[1:] == [-math.inf, -math.inf]


@pytest.mark.parametrize("path", ["reference", *PATHS])
def test_a_row_with_no_numbers_says_so(path: Backend) -> None:
    logits = rows_of(3, 4, 1500)
    logits[0, [700, 1200]] = math.nan
    logits[1, 1100] = -math.nan
    logits[2, 40] = math.inf
    there = logits.to(device_of(path))
    noisy: dict[str, Any] = {"seed": 3, "positions": [0, 1, 2, 3], "temperature": 0.5}
    for extra in ({}, noisy):
        picks = gumbel_argmax(there, path=path, **extra)
        assert picks.token.tolist()[:3] == [700, 1100, 40]
        assert picks.best.isnan().tolist() == [True, True, False, False]
        assert picks.best[2] == math.inf


@pytest.mark.parametrize("path", PATHS)
def test_the_noise_is_that_of_the_house(path: Backend) -> None:
    """With logits of nought, best and second are the two largest of the house's noise, bit for bit."""
    house = GumbelNoise(2026, 2100)
    logits = torch.zeros(2, 2100, device=device_of(path))
    picks = gumbel_argmax(logits, seed=2026, positions=[4, 2**33], path=path)
    for index, position in enumerate((4, 2**33)):
        top = house.row(position).topk(2)
        assert picks.token[index] == top.indices[0]
        assert [picks.best[index], picks.second[index]] == top.values.tolist()


def test_rows_at_hand_are_used_and_left_alone() -> None:
    asked = []

    def noise(position: int) -> Tensor:
        asked.append(position)
        return torch.arange(6.0) * position

    logits = torch.zeros(3, 6)
    picks = gumbel_argmax(logits, seed=1, positions=[2, 3, 2], noise=noise, path="eager")
    assert sorted(asked) == [2, 3]
    assert picks.best.tolist() == [10.0, 15.0, 10.0]
    assert not logits.any()


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_noise_may_lie_in_a_table(path: Backend) -> None:
    noise, table, positions = GumbelNoise(2026, 2100), torch.full((8, 2100), torch.nan), [4, 2**33 + 1, 4]
    logits = torch.randn(3, 2100, generator=torch.Generator().manual_seed(1)).to(device_of(path))
    for position in positions:
        table[position % 8] = noise.row(position)
    table = table.to(device_of(path))
    made = gumbel_argmax(logits, seed=2026, positions=positions, temperature=0.5, path=path)
    given = gumbel_argmax(logits, seed=2026, positions=positions, temperature=0.5, table=table, path=path)
    assert all(torch.equal(mine, yours) for mine, yours in zip(made, given, strict=True))
    if path == "triton":
        table[1, 77] = 99.0
        told = gumbel_argmax(logits, seed=2026, positions=positions, table=table, path=path)
        assert told.token[1] == 77, "it is read"


@pytest.mark.gpu
@needs_compiled_kernels
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_large_vocabulary_on_a_gpu(path: Backend, dtype: torch.dtype) -> None:
    logits, positions = rows_of(5, 40, 128_256, dtype), [row // 7 for row in range(40)]
    least = borders(logits, 0.7, 300)
    agree(path, logits, "cuda", seed=9, positions=positions, temperature=0.7, min_score=least)
