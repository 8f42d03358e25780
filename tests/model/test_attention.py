"""Tree attention compared with a plain reference: one path at a time, no cache, dense softmax."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.model.attention import TreeContext, attend_tree
from offspec_kernels.chunks import split_evenly


def _obvious(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[list[int]],
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend from row i of q [H, T, D] to the keys rows[i] of k [KV, S, D], in float64."""
    heads, group = q.shape[0], q.shape[0] // k.shape[0]
    out = torch.empty(q.shape[1], heads, v.shape[-1], dtype=torch.float64)
    for i, seen in enumerate(rows):
        for head in range(heads):
            scores = k[head // group, seen].double() @ q[head, i].double() * scale
            if cap:
                scores = torch.tanh(scores / cap) * cap
            if sinks is not None:  # sinks add to the denominator and have no value
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            out[i, head] = torch.softmax(scores, 0)[: len(seen)] @ v[head // group, seen].double()
    return out


@settings(deadline=None, max_examples=60)
@given(
    prefix=st.integers(0, 12),
    causal=st.integers(0, 7),
    parents=st.lists(st.integers(0, 100), max_size=12),
    groups=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 4]),
    cap=st.sampled_from([None, 2.0]),
    chunk=st.integers(1, 9),
    sunk=st.booleans(),
    seed=st.integers(0, 100),
)
def test_attention_equals_each_path_alone(
    prefix: int,
    causal: int,
    parents: list[int],
    groups: int,
    window: int | None,
    cap: float | None,
    chunk: int,
    sunk: bool,
    seed: int,
) -> None:
    """Any prefix, prompt, tree, window and chunking; parents[i] is taken modulo i + 1."""
    tree = [-1, *(above % (i + 1) for i, above in enumerate(parents))]
    depth = [0] * len(tree)
    paths: list[list[int]] = []
    for node, above in enumerate(tree):
        depth[node] = 0 if above < 0 else depth[above] + 1
        paths.append(([] if above < 0 else paths[above]) + [node])
    start = prefix + causal
    position = [*range(prefix, start), *(start + d for d in depth)]
    seen = [list(range(row + 1)) for row in range(prefix, start)]
    seen += [[*range(start), *(start + node for node in path)] for path in paths]
    if window:
        where = [*range(prefix), *position]
        seen = [[key for key in keys if position[i] - where[key] < window] for i, keys in enumerate(seen)]
    ancestors = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for node, path in enumerate(paths):
        ancestors[node, path] = True
    generator = torch.Generator().manual_seed(seed)
    rows, keys, size = len(position), start + len(tree), 8
    q = torch.randn(2 * groups, rows, size, generator=generator)
    k, v = torch.randn(2, 2, keys, size, generator=generator)
    sinks = torch.randn(2 * groups, generator=generator) if sunk else None
    context = TreeContext(prefix, torch.tensor(position), causal, ancestors)
    outs = []
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        out, _ = attend_tree(
            torch.nn.Module(),
            q[None, :, begin:end],
            k[None, :, : prefix + end],
            v[None, :, : prefix + end],
            None,
            scaling=0.3,
            sliding_window=window,
            softcap=cap,
            s_aux=sinks,
            tree=context,
        )
        outs.append(out[0])
    assert torch.allclose(torch.cat(outs).double(), _obvious(q, k, v, seen, 0.3, cap, sinks), atol=1e-5)


@given(start=st.integers(0, 50), rows=st.integers(0, 500), most=st.integers(3, 64))
def test_pieces_cover_all_rows_and_leave_none_alone(start: int, rows: int, most: int) -> None:
    parts = split_evenly(start, start + rows, most)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(start, start + rows))
    sizes = [part.stop - part.start for part in parts]
    assert all(1 < size <= most for size in sizes) or rows == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_uploads_its_new_rows_and_attends_to_all(device: str) -> None:
    """Steps of a growing tree, each uploaded in one copy, compared with slices of the whole tree's mask."""
    there, causal, sees = torch.device(device), 3, np.eye(70, dtype=np.bool_)
    for node in range(1, 70):
        sees[node] |= sees[(node - 1) // 2]
    position = [*range(20, 23), *(23 + int(row.sum()) - 1 for row in sees)]
    whole = TreeContext(20, torch.tensor(position), causal, torch.from_numpy(sees))
    for start, end in ((0, 4), (4, 5), (5, 68), (68, 73)):
        rows = end - causal
        tokens, context = TreeContext.of_step(
            range(start, end), position[:end], sees[:rows, :rows], prefix=20, causal=causal, device=there
        )
        assert tokens.tolist() == list(range(start, end)) and context.position.tolist() == position[:end]
        found, expected = context.tree_mask(start, end), whole.tree_mask(start, end)
        assert found.extents() == expected.extents()
        for name in ("prefix", "first", "count", "causal", "words"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
        assert np.array_equal(found.words_of(0), expected.words[0].numpy())
