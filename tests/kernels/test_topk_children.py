"""Every path of topk_children finds the reference's children, in the reference's order."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offspec.sampling.noise import GumbelNoise
from offspec_kernels.backend import Backend
from offspec_kernels.topk_children import BLOCK, MOST, TopChildren, topk_children
from tests.support.kernel_device import device_of, examples, moved, needs_compiled_kernels
from tests.support.poison import poisoned

PATHS: list[Backend] = ["eager", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_of(seed: int, width: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[W, V], cut from rows with NaN to their left and right."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((width, size + 7), torch.nan, dtype=dtype)
    wide[:, 3 : 3 + size] = (4 * torch.randn(width, size, generator=generator)).to(dtype)
    return wide[:, 3 : 3 + size]


def agree(
    path: Backend, logits: Tensor, count: int, device: str | None = None, **arguments: Any
) -> TopChildren:
    """The children of `path` on `device`, compared with the reference's."""
    device = device or device_of(path).type
    expected = topk_children(logits, count, path="reference", **arguments)
    before = logits.clone()
    there = moved(logits, device)
    with poisoned():
        got = topk_children(there, count, path=path, **arguments)
    assert torch.equal(there.cpu(), before), "the logits are left as they are"
    assert got.token.device.type == device
    assert torch.equal(got.token.cpu(), expected.token)
    torch.testing.assert_close(got.relative.cpu(), expected.relative, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.log_prob.cpu(), expected.log_prob, rtol=1e-5, atol=1e-5, equal_nan=True)
    return got


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(20, compiled=20), deadline=None)
@given(data=st.data())
def test_every_path_finds_the_children_of_the_reference(path: Backend, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 127, 128, 129, 640, 1025, 2500]))
    width = data.draw(st.integers(0, 10 if size < 700 else 3))
    logits = rows_of(data.draw(st.integers(0, 999)), width, size, data.draw(st.sampled_from(DTYPES)))
    if data.draw(st.booleans()):
        logits.round_()  # so that many are equal
    logits[:, data.draw(st.integers(1, size)) :] = -torch.inf  # a draft with a smaller vocabulary
    arguments: dict[str, Any] = {"tau": data.draw(st.sampled_from([1.0, 0.3, 2.2]))}
    if data.draw(st.booleans()):
        arguments["seed"] = data.draw(st.integers(0, 2**64 - 1))
        position = st.sampled_from([0, 40, 41, 2**40])
        arguments["positions"] = data.draw(st.lists(position, min_size=width, max_size=width))
    agree(path, logits, data.draw(st.integers(1, min(size, 9))), **arguments)


@pytest.mark.parametrize("path", PATHS)
def test_more_children_than_one_program_finds(path: Backend) -> None:
    logits = rows_of(1, 2, 3000)
    for count in (33, MOST + 1):
        agree(path, logits, count, seed=5, positions=[1, 2])


@pytest.mark.parametrize("path", PATHS)
def test_of_equal_tokens_the_lowest_come_first(path: Backend) -> None:
    """Equal within a block, in blocks that are equal, and in zeros of both signs."""
    level = torch.zeros(1, 40 * BLOCK)
    level[0, ::3] = -0.0
    assert agree(path, level, 8).token[0].tolist() == list(range(8))
    level[0, [700, 701, 2000, 5000]] = 1.0
    assert agree(path, level, 8).token[0].tolist() == [700, 701, 2000, 5000, 0, 1, 2, 3]
    nothing = torch.full((1, 40 * BLOCK), -torch.inf)
    nothing[0, 4000] = 0.0
    assert agree(path, nothing, 4).token[0].tolist() == [4000, 0, 1, 2]


@pytest.mark.parametrize("path", ["reference", *PATHS])
def test_a_row_with_nan_says_so_and_leaves_the_others_alone(path: Backend) -> None:
    logits = rows_of(2, 3, 1000)
    logits[1, 500] = torch.nan
    found = topk_children(logits.to(device_of(path)), 4, path=path)
    assert found.log_prob[1].isnan().all()
    assert found.log_prob[[0, 2]].isfinite().all()


def test_rows_of_noise_may_come_from_the_caller() -> None:
    logits, noise, asked = rows_of(3, 3, 1000), GumbelNoise(11, 1000), []

    def row(position: int) -> Tensor:
        asked.append(position)
        return noise.row(position)

    made = topk_children(logits, 5, seed=11, positions=[7, 8, 7], path="eager")
    given = topk_children(logits, 5, seed=11, positions=[7, 8, 7], noise=row, path="eager")
    assert torch.equal(made.token, given.token) and torch.equal(made.log_prob, given.log_prob)
    assert sorted(asked) == [7, 8]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("positions", [[7, 7, 7], [7, 2**40 + 1, 8]])
def test_rows_of_noise_may_lie_in_a_table(positions: list[int], path: Backend) -> None:
    """And positions may be a tensor."""
    logits, noise, table = rows_of(3, 3, 1000), GumbelNoise(11, 1000), torch.full((4, 1000), torch.nan)
    for position in positions:
        table[position % 4] = noise.row(position)
    logits, table = logits.to(device_of(path)), table.to(device_of(path))
    there = torch.tensor(positions, device=logits.device)
    made = topk_children(logits, 5, seed=11, positions=positions, path=path)
    for other in (
        topk_children(logits, 5, seed=11, positions=positions, table=table, path=path),
        topk_children(logits, 5, seed=11, positions=there, path=path),
    ):
        assert torch.equal(made.token, other.token) and torch.equal(made.log_prob, other.log_prob)
    if path == "triton":
        table[positions[2] % 4, 444] = 99.0
        changed = topk_children(logits, 5, seed=11, positions=positions, table=table, path=path)
        assert changed.token[2, 0] == 444, "it is read"


@pytest.mark.parametrize("within", [True, False])
def test_the_room_is_used_and_may_hold_the_logits(within: bool) -> None:
    logits, room = rows_of(5, 2, 1000), torch.full((2, 8 * BLOCK), torch.nan)
    expected = topk_children(logits, 6, path="reference")
    given = room[:, :1000].copy_(logits) if within else logits
    found = topk_children(given, 6, scratch=room, path="eager")
    assert torch.equal(found.token, expected.token)
    torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=1e-5, atol=1e-5)
    assert not room.isnan().any()


@pytest.mark.gpu
@needs_compiled_kernels
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_vocabulary_on_a_gpu(path: Backend, dtype: torch.dtype) -> None:
    logits, positions = rows_of(6, 19, 50_000, dtype), [row // 3 for row in range(19)]
    agree(path, logits, 32, "cuda", tau=0.7, seed=2**63 + 1, positions=positions)


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_other_logits_and_positions() -> None:
    logits, positions = rows_of(7, 4, 9000).cuda(), torch.tensor([5, 5, 6, 6], device="cuda")
    topk_children(logits, 8, seed=3, positions=positions, path="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk_children(logits, 8, seed=3, positions=positions, path="triton")
    logits.copy_(rows_of(8, 4, 9000))
    positions += 100
    graph.replay()
    expected = topk_children(logits.cpu(), 8, seed=3, positions=[105, 105, 106, 106], path="reference")
    assert torch.equal(found.token.cpu(), expected.token)


@pytest.mark.parametrize("path", ["reference", "eager"])
def test_numbers_at_the_ends(path: Backend) -> None:
    """What inf - inf gives has its sign bit set, and as an integer lies below -inf."""
    for size in (129, 300):
        logits = torch.full((1, size), torch.nan).neg()
        assert int(topk_children(logits, 2, path=path).token.max()) < size, "a token's name all the same"
    huge = topk_children(torch.tensor([[3e38, 3e38, -3e38]]), 2, tau=0.001, path=path)
    assert torch.allclose(huge.log_prob, torch.full((1, 2), -math.log(2)))
