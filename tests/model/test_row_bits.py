"""A row has the same bits in a pass whatever the other rows.

Attention has its own tests and is replaced here: every row attends only to itself and starts its own state.
This tests the rest of a pass: embedding, norms, rotary embedding, products, activations, routers and experts,
state updates, and the head.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offspec.checkpoint import open_checkpoint
from offspec.model import attention
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.recurrence import state_cache
from offspec.model.recurrence.paths import PartPaths
from offspec_kernels.tree_scan import traversal_order
from offspec_planners.placement import Placement
from tests.support import packers
from tests.support.exhaustive import sampled_params
from tests.support.packed_models import packed_checkpoint, to_grouped
from tests.support.tiny_models import (
    FAMILIES,
    HYBRIDS,
    VOCABULARY,
    nothing,
    open_model,
    write_hybrid,
    write_model,
)

_POSITION, _TOKEN = 37, 5
_HUGE = (90, 91)  # tokens whose embeddings are
_CHUNK = 96


def _look_at_itself(query: Any, key: Any, value: Any, mask: Any, *, out: torch.Tensor, **how: Any) -> None:
    rows, groups = query.shape[2], query.shape[1] // key.shape[1]
    same = (query * key[:, :, -rows:].repeat_interleave(groups, 1)).sum(-1, keepdim=True).tanh()
    out.copy_(value[:, :, -rows:].repeat_interleave(groups, 1) * same)


def _begin_alone(context: TreeContext, start: int, end: int) -> PartPaths:
    order = traversal_order([-1] * (end - start)).remap_rows(np.arange(start, end))
    return PartPaths(False, start, np.full(end, -1), order)


@pytest.fixture
def no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace attention in opened models only: the trial of an architecture would refuse it."""
    monkeypatch.setattr(attention, "tree_attention", _look_at_itself)
    monkeypatch.setattr(state_cache, "part_paths", _begin_alone)


# Relevant differences of families: norms, activations, layouts of weights, experts and routers.
_SOME = ("gemma2", "gpt2", "gpt_oss", "llama", "mixtral", "phi3", "qwen2_moe")
_SOME_HYBRIDS = ("falcon_h1", "mamba", "qwen3_5_text")


def _enlarge(module: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isin(args[0], torch.tensor(_HUGE))[..., None], out * 1e4, out)


def _load(model: LoadedModel) -> LoadedModel:
    layers = range(len(model.layers))
    model.load(Placement.in_memory(len(layers), layers, 0), 600, nothing, chunk=_CHUNK)
    return model


_EVERY = (*FAMILIES, *HYBRIDS, "llama in float32", "mamba in float32")


@pytest.fixture(scope="module", params=sampled_params(_EVERY, *_SOME, *_SOME_HYBRIDS, one_in=3))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    family, _, dtype = request.param.partition(" in ")
    folder = tmp_path_factory.mktemp("model")
    if family in HYBRIDS:
        write_hybrid(folder, family)
    else:
        write_model(folder, family, spread=0.3)
    loaded = _load(open_model(folder, torch.float32 if dtype else torch.bfloat16))
    loaded.skeleton.model.get_input_embeddings().register_forward_hook(_enlarge)
    yield loaded
    loaded.close()


def _row(model: LoadedModel, rows: int, place: int, *, causal: bool, seed: int = 0) -> torch.Tensor:
    """Return states and logits [H + V] of one row at `place` among `rows` arbitrary rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows,), generator=generator)
    tokens[place] = _TOKEN
    positions = torch.randint(0, 400, (rows,), generator=generator)
    positions[place] = _POSITION
    sees = torch.eye(0 if causal else rows, dtype=torch.bool)
    context = TreeContext(0, positions, rows if causal else 0, sees)
    tree_model = model.tree_model
    with torch.no_grad():
        hidden = tree_model.hidden(tokens, context)
        assert len(hidden) == rows and tree_model.cache.rows[0].filled in (rows, 0)
        likely = [place, *(row for row in range(rows) if row != place)]
        logits = tree_model.logits_by_row(hidden)(likely[: 1 + seed])[0]
        tree_model.cache.rewind(0)
    return torch.cat([hidden[place], logits])


@pytest.mark.usefixtures("no_attention")
def test_the_bits_of_a_row(model: LoadedModel) -> None:
    model.tree_model.cache.rewind(0)
    alone = _row(model, 1, 0, causal=False)
    assert alone.isfinite().all()
    for turn, rows in enumerate((2, 3, 5, 9, 13, 31, 64, 65, 96, 512)):
        for place in {0, rows // 2, rows - 1}:  # alternately in a prompt and in a tree
            causal = (turn + (place > 0) + (place == rows - 1)) % 2 == 0
            row = _row(model, rows, place, causal=causal, seed=rows + place)
            assert torch.equal(row, alone), f"{rows} rows, at {place}, {causal=}"


@pytest.mark.usefixtures("no_attention")
def test_padding_is_neither_stored_nor_returned(model: LoadedModel) -> None:
    """Auxiliary states, states and cache have the requested rows only, after a prompt that is also padded."""
    tree_model, rows = model.tree_model, 11
    tree_model.aux_layers = (0, len(model.layers))
    tree_model.cache.rewind(0)
    sees = torch.eye(6, dtype=torch.bool)
    context = TreeContext(0, torch.arange(rows), 5, sees)
    with torch.no_grad():
        hidden = tree_model.hidden(torch.arange(3, 3 + rows), context)
    assert [len(states) for states in tree_model.aux_hidden_states.values()] == [rows, rows] and len(
        hidden
    ) == rows
    filled = {
        layer.filled for layer in tree_model.cache.rows
    }  # 0: the layer shares another's keys, or is recurrent
    assert filled - {0} == {rows} or not any(model.skeleton.rows.kept)
    assert tree_model.cache.padding == context.padding == 0
    tree_model.aux_layers = ()


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize("format", ["awq", "gptq", "grouped"])
def test_the_bits_of_a_row_with_packed_weights(
    tmp_path: Path, format: str, request: pytest.FixtureRequest
) -> None:
    """Values stored by rows, and by columns."""
    dense = write_model(tmp_path / "dense", spread=0.3, hidden_size=64, intermediate_size=128)
    packed = tmp_path / "packed"
    if format == "awq":
        packers.requantize(dense, packed, _AWQ, lambda shape: packers.awq(shape, 32))
    elif format == "gptq":
        packers.requantize(dense, packed, _GPTQ, lambda shape: packers.gptq(shape, 4, 32))
    if format == "grouped":
        checkpoint, _ = packed_checkpoint(dense, packed, to_grouped(4))
    else:
        checkpoint = open_checkpoint(str(packed))
    model = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
    model.load(Placement.in_memory(len(model.layers), (), 2), 600, nothing, chunk=_CHUNK)
    request.getfixturevalue("no_attention")
    try:
        assert model.is_packed
        alone = _row(model, 1, 0, causal=False)
        for rows in (2, 3, 9, 65, 200):
            for place in {0, rows - 1}:
                assert torch.equal(_row(model, rows, place, causal=rows > 99, seed=rows), alone), rows
    finally:
        model.close()
