"""Packed weights, streamed and unpacked as their modules run, against the same values stored whole."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.folder import Checkpoint
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, on_disk
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.model import binding, row_counts, unpacking
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.quantize.resident_layers import RoundedLayers
from offspec.model.row_counts import ProductShape
from offspec.model.unpacking import Scratch
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.packed_linear import packed_linear as panels
from offspec_kernels.row_linear import blocks
from offspec_planners.placement import Placement, Tier
from tests.support.packed_models import packed_checkpoint, to_grouped
from tests.support.tiny_models import VOCABULARY, nothing, open_model, write_config, write_model

CPU = torch.device("cpu")
IDS = torch.tensor([5, 9, 2, 40, 7, 7, 31])
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_EVERYTHING = Placement.in_memory(3, range(3), 0)
_STREAMED = Placement.in_memory(3, [], 2)
_HEAD_TOO = replace(_STREAMED, head=Tier.DISK)
_MIXED = Placement.in_memory(3, [1], 2)
_PLACEMENTS = {"memory": _EVERYTHING, "streamed": _STREAMED, "head too": _HEAD_TOO}
_FAMILIES = ("llama", "gemma2", "mixtral", "qwen3_moe", "gpt2", "phi3")


def _model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, CPU)


def _logits(
    model: LoadedModel, placement: Placement, *, unpacked: bool = False, passes: int = 2
) -> torch.Tensor:
    """Of the last of some passes over the same text."""
    model.load(placement, 32, nothing, chunk=4, unpacked=unpacked)
    for _ in range(passes):
        with torch.no_grad():
            hidden = model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), CPU))
            logits = model.tree_model.logits(hidden)
        model.tree_model.cache.rewind(0)
    return logits


@pytest.mark.parametrize(
    ("place", "family"),
    [*(("mixed", family) for family in _FAMILIES), *((place, "mixtral") for place in _PLACEMENTS)],
)
def test_the_same_as_stored_whole(tmp_path: Path, place: str, family: str) -> None:
    placement = _PLACEMENTS.get(place, _MIXED)
    overrides = {"n_embd": 64, "n_inner": 128} if family == "gpt2" else SIZES
    source = write_model(tmp_path / "source", family, moe_intermediate_size=64, **overrides)
    checkpoint, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(4), everything=True)
    packed, whole = _model(checkpoint), open_model(dense)
    try:
        assert packed.is_packed and not whole.is_packed
        expected = _logits(whole, _EVERYTHING)
        assert torch.equal(_logits(packed, placement), expected)
    finally:
        packed.close()
        whole.close()


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_what_layers_read_directly(tmp_path: Path, family: str) -> None:
    """The module of a matrix that a layer takes for itself never runs, so its values are made beforehand."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "pad_token_id": 0}
    rank = "mamba_dt_rank" if family == "jamba" else "time_step_rank"
    source = write_config(
        tmp_path / "source", AutoConfig.for_model(family, vocab_size=VOCABULARY, **sizes, **{rank: 64})
    )
    checkpoint, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(4))
    assert any(
        name.endswith("dt_proj.weight") and isinstance(weight, PackedInfo)
        for name, weight in checkpoint.tensors.items()
    )
    packed, whole = _model(checkpoint), open_model(dense)
    try:
        assert torch.equal(_logits(packed, _MIXED), _logits(whole, _EVERYTHING))
    finally:
        packed.close()
        whole.close()


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16), (8, torch.float32)],
)
def test_widths_and_dtypes(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    source = write_model(tmp_path / "source", **SIZES)
    checkpoint, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(bits))
    packed, loaded, whole = _model(checkpoint, dtype), _model(checkpoint, dtype), open_model(dense, dtype)
    try:
        expected = _logits(whole, _EVERYTHING)
        assert torch.equal(_logits(packed, _MIXED), expected)
        assert torch.equal(_logits(loaded, _EVERYTHING, unpacked=True), expected)
    finally:
        for model in (packed, loaded, whole):
            model.close()


def test_what_it_takes(tmp_path: Path) -> None:
    """A layer takes its bytes on disk while it is packed, and those of its values where it is not."""
    source = write_model(tmp_path / "source", **SIZES)
    checkpoint, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(4))
    packed, whole = _model(checkpoint), open_model(dense)
    layer = [weight for name, weight in checkpoint.tensors.items() if ".layers.0." in name]
    stored = sum(info.nbytes for weight in layer for info in on_disk(weight))
    assert stored <= packed.layer_bytes[0]
    values = sum(parameter.numel() for parameter in whole.skeleton.layers[0].parameters())
    assert 4 * values <= packed.held_bytes[0] <= 4 * values + packed.layer_bytes[0]
    largest = 64 * 128
    assert packed.scratch_bytes(8, 32, 8) - whole.scratch_bytes(8, 32, 8) == 4 * largest
    _logits(packed, _STREAMED, passes=3)
    try:
        # Of three passes, and of what is read ahead of a fourth at most.
        assert 2.9 * sum(packed.layer_bytes) <= packed.bytes_streamed <= 5 * sum(packed.layer_bytes)
    finally:
        packed.close()
        whole.close()


def test_an_interrupt_within_a_module(tmp_path: Path) -> None:
    """Ctrl-C between a weight's unpacking and its product leaves a model that goes on as before."""
    source = write_model(tmp_path / "source", **SIZES)
    checkpoint, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(4))
    packed, whole = _model(checkpoint), open_model(dense)
    expected = _logits(whole, _EVERYTHING)
    packed.load(_MIXED, 32, nothing, chunk=4)
    module: Any = packed.skeleton.model.get_submodule("model.layers.1.mlp.down_proj")
    forward, struck = module.forward, list[bool]()

    def strike(hidden: torch.Tensor) -> torch.Tensor:
        if not struck:
            struck.append(True)
            raise KeyboardInterrupt
        product: torch.Tensor = forward(hidden)
        return product

    module.forward = strike
    context = TreeContext.chain(len(IDS), CPU)
    try:
        with torch.no_grad():
            with pytest.raises(KeyboardInterrupt):
                packed.tree_model.hidden(IDS, context)
            packed.recover()
            packed.tree_model.cache.rewind(0)
            assert [scratch.taken for scratch in packed._scratches.values()] == [0]
            logits = packed.tree_model.logits(packed.tree_model.hidden(IDS, context))
        assert torch.equal(logits, expected)
    finally:
        packed.close()
        whole.close()


@pytest.mark.parametrize("unpacked", [True, False])
def test_damaged_scales(tmp_path: Path, unpacked: bool) -> None:
    source = write_model(tmp_path / "source", **SIZES)
    checkpoint, _ = packed_checkpoint(source, tmp_path / "packed", _with_a_nan(to_grouped(4)))
    model = _model(checkpoint)
    try:
        with pytest.raises(CheckpointError, match=r"no numbers.*download"):
            _logits(model, _EVERYTHING if unpacked else _STREAMED, unpacked=unpacked)
    finally:
        model.close()


@pytest.mark.skipif(not blocks.works(), reason="no product of blocks on this processor")
@pytest.mark.parametrize("damaged", [False, True])
def test_a_first_product_checks_values(
    tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it makes of them: no weight is unpacked whole unless one of its values may be no number."""
    whole, values_of = list[str](), unpacking.values_of

    def unpacked(weight: Weight, *given: Any) -> Any:
        if isinstance(weight, PackedInfo):
            whole.append(weight.name)
        return values_of(weight, *given)

    monkeypatch.setattr(unpacking, "values_of", unpacked)
    source = write_model(tmp_path / "source", **SIZES)
    rounding = _with_a_nan(to_grouped(4)) if damaged else to_grouped(4)
    checkpoint, _ = packed_checkpoint(source, tmp_path / "packed", rounding)
    model = _model(checkpoint, torch.bfloat16)
    model.load(_STREAMED, 32, nothing, chunk=4)
    try:
        with (
            torch.no_grad(),
            pytest.raises(CheckpointError, match=r"no numbers") if damaged else nullcontext(),
        ):
            model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), CPU))
        assert len(whole) == damaged
    finally:
        model.close()


@pytest.mark.skipif(not blocks.works(), reason="no product of blocks on this processor")
@pytest.mark.parametrize("biased", [False, True])
def test_panels_make_what_all_values_make(
    tmp_path: Path, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: whether weights are unpacked as they are loaded depends on the memory there is."""
    made = list[bool]()

    def watched(*given: Any) -> torch.Tensor | None:
        out = panels(*given)
        made.append(out is not None)
        return out

    monkeypatch.setattr(binding, "packed_linear", watched)
    source = write_model(tmp_path / "source", **SIZES, attention_bias=biased)
    checkpoint, _ = packed_checkpoint(source, tmp_path / "packed", to_grouped(4))
    models = [_model(checkpoint, torch.bfloat16) for _ in range(2)]
    try:
        whole = _logits(models[0], _EVERYTHING, unpacked=True)
        assert not made
        assert torch.equal(_logits(models[1], _STREAMED), whole)
        assert made and all(made)
    finally:
        for model in models:
            model.close()


def test_panels_that_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they give a row other bits than torch's product, they are not used."""
    shapes = [ProductShape(64, 128), ProductShape(128, 64)]
    if not blocks.replaces_torch():
        assert row_counts.panels_agree(shapes, torch.bfloat16) == blocks.works()
    assert not row_counts.panels_agree(shapes, torch.float32)
    monkeypatch.setattr(
        blocks, "row_linear", lambda rows, weight: (rows @ weight.mT).nextafter(rows.new_ones(()))
    )
    row_counts._agrees.cache_clear()
    assert not row_counts.panels_agree(shapes, torch.bfloat16)
    row_counts._agrees.cache_clear()


def _with_a_nan(rounding: Callable) -> Callable:  # type: ignore[type-arg]
    def rounded(weight: torch.Tensor) -> object:
        format_, parts = rounding(weight)
        parts["step"][-1, -1] = torch.nan
        return format_, parts

    return rounded


def test_scratch_is_a_stack() -> None:
    scratch = Scratch(10, torch.float32, CPU)
    first, second = scratch.take(6), scratch.take(4)
    beyond = scratch.take(3)
    assert first.data_ptr() + 24 == second.data_ptr() and len(beyond) == 3
    scratch.taken = 6
    assert scratch.take(4).data_ptr() == second.data_ptr()


def test_an_interrupt_within_a_packed_draft(tmp_path: Path) -> None:
    """What its scratch lent when Ctrl-C struck is given back before the next pass."""
    model = open_model(write_model(tmp_path / "model", **SIZES))
    model.load_rounded(4, False, 32, nothing, IDS.tolist())
    layers = model._feeder
    assert isinstance(layers, RoundedLayers)
    scratch = layers.room()
    module: Any = model.skeleton.model.get_submodule("model.layers.1.mlp.down_proj")
    forward = module.forward

    def strike(hidden: torch.Tensor) -> torch.Tensor:
        module.forward = forward
        raise KeyboardInterrupt

    module.forward = strike
    context = TreeContext.chain(len(IDS), CPU)
    try:
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model.tree_model.hidden(IDS, context)
        model.tree_model.cache.rewind(0)
        with torch.no_grad():
            model.tree_model.hidden(IDS, context)
        assert scratch.taken == 0
    finally:
        model.close()


def test_code_is_compiled_once_for_a_kind_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that differ in nothing but a number of their own are not each unpacked for it."""
    unpacked = list[int]()
    monkeypatch.setattr(
        unpacking, "values_of", lambda weight, *rest: unpacked.append(weight.format.nested_offset)
    )
    formats = [Codebook("nf4", 64, torch.uint8, 256, float(offset)) for offset in range(5)]
    info = TensorInfo("part", "U8", (32,), Path("file"), 0, 32)
    weights = [PackedInfo(str(i), (1, 64), format_, (("codes", info),)) for i, format_ in enumerate(formats)]
    unpacking.warm_up(weights, torch.float32, CPU)
    assert len(unpacked) == 1


def test_a_packed_head_over_plain_layers_streams_in_large_blocks(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=False, **SIZES)
    checkpoint, _ = packed_checkpoint(source, tmp_path / "packed", to_grouped(8), everything=True)
    tensors = {**checkpoint.tensors}
    plain = open_checkpoint(str(source)).tensors
    tensors |= {name: weight for name, weight in plain.items() if ".layers." in name}
    model = LoadedModel(checkpoint.folder, tensors, torch.float32, CPU)
    try:
        assert not model.is_packed and len(model._head_blocks()) == 1
        _logits(model, _HEAD_TOO)
    finally:
        model.close()


def test_a_tied_model_with_a_quantised_head_of_its_own(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", tie_word_embeddings=False, **SIZES)
    checkpoint, _ = packed_checkpoint(source, tmp_path / "packed", to_grouped(8), everything=True)
    config = json.loads((checkpoint.folder / "config.json").read_text())
    (checkpoint.folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings to false"):
        _model(checkpoint)
