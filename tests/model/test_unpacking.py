"""Packed weights, unpacked as their modules run, compared with the same values stored unpacked."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, stored_tensors
from offspec.core.errors import CheckpointError, UnsupportedModelError
from offspec.model import binding, row_counts, unpacking
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.quantize.quantized_layers import QuantizedLayers
from offspec.model.row_counts import ProductShape
from offspec.model.unpacking import Scratch
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.packed_linear import packed_linear as panels
from offspec_kernels.row_linear import blocks
from offspec_planners.placement import Placement, Tier
from tests.support.packed_models import packed_checkpoint, to_grouped
from tests.support.poison import poisoned
from tests.support.tiny_models import VOCABULARY, nothing, open_model, write_config, write_model

CPU = torch.device("cpu")
IDS = torch.tensor([5, 9, 2, 40, 7, 7, 31])
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
_EVERYTHING = Placement.in_memory(3, range(3), 0)
_STREAMED = Placement.in_memory(3, [], 2)
_HEAD_TOO = replace(_STREAMED, head=Tier.DISK)
_MIXED = Placement.in_memory(3, [1], 2)
_PLACEMENTS = {"memory": _EVERYTHING, "streamed": _STREAMED, "head too": _HEAD_TOO}
needs_blocks = pytest.mark.skipif(not blocks.is_supported(), reason="no product of blocks on this processor")
_FAMILIES = ("llama", "gemma2", "mixtral", "qwen3_moe", "gpt2", "phi3")


class Pair:
    """A model with packed weights, and one with the same values unpacked; both are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.models = folder, list[LoadedModel]()

    def write(self, family: str = "llama", **sizes: Any) -> Path:
        return write_model(self.folder / "source", family, **{**SIZES, **sizes})

    def pack(self, source: Path, rounding: Any, *, everything: bool = False) -> None:
        self.checkpoint, self.dense = packed_checkpoint(
            source, self.folder / "packed", rounding, everything=everything
        )

    def packed(self, dtype: torch.dtype = torch.float32) -> LoadedModel:
        self.models.append(LoadedModel(self.checkpoint.folder, self.checkpoint.tensors, dtype, CPU))
        return self.models[-1]

    def whole(self, dtype: torch.dtype = torch.float32) -> LoadedModel:
        self.models.append(open_model(self.dense, dtype))
        return self.models[-1]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    for model in pair.models:
        model.close()


def _logits(
    model: LoadedModel, placement: Placement, *, unpacked: bool = False, passes: int = 2
) -> torch.Tensor:
    """Return the logits of the last of several passes over the same text."""
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
def test_packed_weights_match_stored_values(pair: Pair, place: str, family: str) -> None:
    sizes = {"n_embd": 64, "n_inner": 128} if family == "gpt2" else {"moe_intermediate_size": 64}
    pair.pack(pair.write(family, **sizes), to_grouped(4), everything=True)
    packed, whole = pair.packed(), pair.whole()
    assert packed.is_packed and not whole.is_packed
    placement = _PLACEMENTS.get(place, _MIXED)
    assert torch.equal(_logits(packed, placement), _logits(whole, _EVERYTHING))


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_matrices_that_layers_read_directly(pair: Pair, family: str) -> None:
    """The module of a matrix that a layer reads directly never runs, so it is unpacked in advance."""
    rank = "mamba_dt_rank" if family == "jamba" else "time_step_rank"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, rank: 64}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    pair.pack(write_config(pair.folder / "source", config), to_grouped(4))
    assert any(
        name.endswith("dt_proj.weight") and isinstance(weight, PackedInfo)
        for name, weight in pair.checkpoint.tensors.items()
    )
    assert torch.equal(_logits(pair.packed(), _MIXED), _logits(pair.whole(), _EVERYTHING))


@pytest.mark.parametrize(
    ("bits", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.bfloat16), (8, torch.float32)]
)
def test_widths_and_dtypes(pair: Pair, bits: int, dtype: torch.dtype) -> None:
    """Unpacked as modules run, or as layers are loaded."""
    pair.pack(pair.write(), to_grouped(bits))
    expected = _logits(pair.whole(dtype), _EVERYTHING)
    assert torch.equal(_logits(pair.packed(dtype), _MIXED), expected)
    assert torch.equal(_logits(pair.packed(dtype), _EVERYTHING, unpacked=True), expected)


def test_memory_of_packed_layers(pair: Pair) -> None:
    """A packed layer takes its bytes on disk, an unpacked one those of its values."""
    pair.pack(pair.write(), to_grouped(4))
    packed, whole = pair.packed(), pair.whole()
    layer = [weight for name, weight in pair.checkpoint.tensors.items() if ".layers.0." in name]
    stored = sum(info.nbytes for weight in layer for info in stored_tensors(weight))
    assert stored <= packed.layer_bytes[0]
    values = sum(parameter.numel() for parameter in whole.skeleton.layers[0].parameters())
    assert 4 * values <= packed.unpacked_layer_bytes[0] <= 4 * values + packed.layer_bytes[0]
    largest = 64 * 128
    assert packed.scratch_bytes(8, 32, 8) - whole.scratch_bytes(8, 32, 8) == 4 * largest
    _logits(packed, _STREAMED, passes=3)
    assert packed.bytes_moved.streamed >= 2.9 * sum(packed.layer_bytes)


def _strike(model: LoadedModel) -> None:
    """Raise KeyboardInterrupt between a weight's unpacking and its product."""
    module: Any = model.skeleton.model.get_submodule("model.layers.1.mlp.down_proj")
    forward = module.forward

    def strike(hidden: torch.Tensor) -> torch.Tensor:
        module.forward = forward
        raise KeyboardInterrupt

    module.forward = strike
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), CPU))


def test_an_interrupt_within_a_module(pair: Pair) -> None:
    """The model remains usable."""
    pair.pack(pair.write(), to_grouped(4))
    packed = pair.packed()
    packed.load(_MIXED, 32, nothing, chunk=4)
    _strike(packed)
    packed.recover()
    packed.tree_model.cache.rewind(0)
    assert [scratch.taken for scratch in packed._scratches.values()] == [0]
    with torch.no_grad():
        hidden = packed.tree_model.hidden(IDS, TreeContext.chain(len(IDS), CPU))
        assert torch.equal(packed.tree_model.logits(hidden), _logits(pair.whole(), _EVERYTHING))


def test_an_interrupt_within_a_packed_draft(pair: Pair) -> None:
    """Workspace in use at the Ctrl-C is released before the next pass."""
    model = open_model(pair.write())
    pair.models.append(model)
    model.load_quantized(4, False, 32, nothing, IDS.tolist())
    layers = model._feeder
    assert isinstance(layers, QuantizedLayers)
    scratch = layers.room()
    _strike(model)
    model.tree_model.cache.rewind(0)
    with torch.no_grad():
        model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), CPU))
    assert scratch.taken == 0


def _damaged(
    rounding: Callable[[torch.Tensor], Any], value: float = torch.nan
) -> Callable[[torch.Tensor], Any]:
    def dequantized(weight: torch.Tensor) -> Any:
        format_, parts = rounding(weight)
        parts["step"][-1, -1] = value
        return format_, parts

    return dequantized


@pytest.mark.parametrize(("unpacked", "value"), [(True, torch.nan), (False, torch.nan), (False, torch.inf)])
def test_damaged_scales(pair: Pair, unpacked: bool, value: float) -> None:
    pair.pack(pair.write(), _damaged(to_grouped(4), value))
    with pytest.raises(CheckpointError, match=r"NaN or infinite values.*download"):
        _logits(pair.packed(), _EVERYTHING if unpacked else _STREAMED, unpacked=unpacked)


@needs_blocks
@pytest.mark.parametrize("damaged", [False, True])
def test_a_first_product_checks_values(pair: Pair, damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its result: a whole weight is unpacked only if a value may be NaN or infinite."""
    whole, values_of = list[str](), unpacking.values_of

    def unpacked(weight: Weight, *given: Any) -> Any:
        if isinstance(weight, PackedInfo):
            whole.append(weight.name)
        return values_of(weight, *given)

    monkeypatch.setattr(unpacking, "values_of", unpacked)
    pair.pack(pair.write(), _damaged(to_grouped(4)) if damaged else to_grouped(4))
    refused = pytest.raises(CheckpointError, match=r"NaN or infinite values") if damaged else nullcontext()
    with poisoned(), refused:  # padding rows are finite as well
        _logits(pair.packed(torch.bfloat16), _STREAMED, passes=1)
    assert len(whole) == damaged


@needs_blocks
@pytest.mark.parametrize("biased", [False, True])
def test_panels_match_unpacked_weights(pair: Pair, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, because the available memory decides whether weights are unpacked at load."""
    made = list[bool]()

    def watched(*given: Any) -> torch.Tensor | None:
        out = panels(*given)
        made.append(out is not None)
        return out

    monkeypatch.setattr(binding, "packed_linear", watched)
    pair.pack(pair.write(attention_bias=biased), to_grouped(4))
    whole = _logits(pair.packed(torch.bfloat16), _EVERYTHING, unpacked=True)
    assert not made
    assert torch.equal(_logits(pair.packed(torch.bfloat16), _STREAMED), whole)
    assert made and all(made)


def test_panels_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are not used if they give a row other bits than torch's product."""
    shapes = [ProductShape(64, 128), ProductShape(128, 64)]
    if not blocks.replaces_torch():
        assert row_counts.panels_agree(shapes, torch.bfloat16) == blocks.is_supported()
    assert not row_counts.panels_agree(shapes, torch.float32)
    monkeypatch.setattr(
        blocks, "row_linear", lambda rows, weight: (rows @ weight.mT).nextafter(rows.new_ones(()))
    )
    row_counts._agrees.cache_clear()
    assert not row_counts.panels_agree(shapes, torch.bfloat16)
    row_counts._agrees.cache_clear()


def test_scratch_is_a_stack() -> None:
    scratch = Scratch(10, torch.float32, CPU)
    first, second = scratch.take(6), scratch.take(4)
    beyond = scratch.take(3)
    assert first.data_ptr() + 24 == second.data_ptr() and len(beyond) == 3
    scratch.taken = 6
    assert scratch.take(4).data_ptr() == second.data_ptr()


def test_code_is_compiled_once_per_kind_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that differ only in a number of their own are not all unpacked."""
    unpacked = list[int]()
    monkeypatch.setattr(
        unpacking, "values_of", lambda weight, *rest: unpacked.append(weight.format.nested_offset)
    )
    formats = [Codebook("nf4", 64, torch.uint8, 256, float(offset)) for offset in range(5)]
    info = TensorInfo("part", "U8", (32,), Path("file"), 0, 32)
    weights = [PackedInfo(str(i), (1, 64), format_, (("codes", info),)) for i, format_ in enumerate(formats)]
    unpacking.warm_up(weights, torch.float32, CPU)
    assert len(unpacked) == 1


def test_packed_heads(pair: Pair) -> None:
    """With plain layers, heads are streamed in large blocks; a tied model cannot have its own head."""
    source = pair.write(tie_word_embeddings=False)
    pair.pack(source, to_grouped(8), everything=True)
    plain = open_checkpoint(str(source)).tensors
    tensors = {**pair.checkpoint.tensors}
    tensors |= {name: weight for name, weight in plain.items() if ".layers." in name}
    model = LoadedModel(pair.checkpoint.folder, tensors, torch.float32, CPU)
    pair.models.append(model)
    assert not model.is_packed and len(model._head_blocks()) == 1
    _logits(model, _HEAD_TOO)
    file = pair.checkpoint.folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings to false"):
        pair.packed()
