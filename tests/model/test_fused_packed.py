"""The fused forward over packed quantized weights, compared with weights unpacked before every module."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offspec.model.attention import TreeContext
from offspec.model.fused import linear
from offspec.model.fused.linear import (
    DenseLinear,
    DequantizingLinear,
    Int4Linear,
    PanelLinear,
    make_linear,
)
from offspec.model.fused.model import FusedModel
from offspec.model.loaded import LoadedModel
from offspec.model.quantize.quantized_layers import quantized_layer_bytes
from offspec.model.quantize.quantized_matrix import QuantizedMatrix, dequantize_matrix, quantize_matrix
from offspec.model.unpacking import Scratch
from offspec_kernels.dequant.grouped import tiles
from offspec_kernels.row_linear import blocks
from tests.support.poison import poisoned
from tests.support.tensor_bytes import tensor_bytes
from tests.support.tiny_models import CALIBRATION, nothing, open_model, write_model

_CPU = torch.device("cpu")
_WHOLE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole groups
_BIASES = {"attention_bias": True, "mlp_bias": True}


def _rounded(folder: Path, bits: int = 4, dtype: torch.dtype = torch.float32) -> LoadedModel:
    model = open_model(folder, dtype)
    model.load_quantized(bits, False, 64, nothing, CALIBRATION)
    return model


def _say(model: Any, rows: int = 20) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.logits(
            model.hidden(torch.arange(3, 3 + rows), TreeContext.chain(rows, _CPU))
        )
    model.cache.rewind(0)
    return found


def _products(model: FusedModel) -> list[Any]:
    return [of for layer in model._layers for of in (layer.qkv, layer.out, layer.gate_up, layer.down)]


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama", 4), ("llama", 3), ("gemma2", 4), ("phi3", 2), ("qwen3", 3)],
)
def test_the_fused_model_matches_unpacked_modules(family: str, bits: int, tmp_path: Path) -> None:
    more = _BIASES if family == "llama" else {}
    folder = write_model(tmp_path / "model", family, spread=0.2, **_WHOLE, **more)
    expected = _say(_rounded(folder, bits).tree_model)
    lean = _rounded(folder, bits).fused_model(64)
    assert lean is not None and expected.std() > 0.1
    kind = Int4Linear if bits == 4 else DequantizingLinear
    assert all(isinstance(product, kind) for product in _products(lean))
    if bits == 4:  # which multiplies in bfloat16
        assert float((_say(lean) - expected).norm() / expected.norm()) < 0.03
    else:
        assert torch.allclose(_say(lean), expected, atol=1e-4, rtol=1e-4)


def test_weights_without_a_packed_product_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If groups span rows, and if there is no product for these weights."""
    narrow, whole = write_model(tmp_path / "narrow"), write_model(tmp_path / "whole", spread=0.2, **_WHOLE)
    expected = _say(_rounded(narrow).tree_model), _say(_rounded(whole).tree_model)
    some_straddle = _rounded(narrow).fused_model(64)
    monkeypatch.setattr(linear, "has_int4_matmul", lambda device, dtype: False)
    without = _rounded(whole).fused_model(64)
    for model, truth in zip((some_straddle, without), expected, strict=True):
        assert model is not None and isinstance(model._layers[0].qkv, DequantizingLinear)
        assert torch.allclose(_say(model), truth, atol=1e-4, rtol=1e-4)


def test_quantized_weights_are_in_memory_once(tmp_path: Path) -> None:
    """In as many bytes as before, and without workspace for values that are never unpacked."""
    model = _rounded(write_model(tmp_path / "model", **_WHOLE), dtype=torch.bfloat16)
    feeder: Any = model._feeder
    stored = sum(map(quantized_layer_bytes, model.skeleton.layers, [4] * 3))
    parts = [
        weakref.ref(part)
        for index in range(3)
        for weight in feeder.packed(index).values()
        for part in weight.parts.values()
    ]
    lean = model.fused_model(64)
    gc.collect()
    assert lean is not None and not any(ref() is not None for ref in parts)
    assert feeder._scratch is None
    norms = sum(w.nbytes for layer in model.skeleton.layers for w in layer.parameters() if w.dim() == 1)
    assert sum(map(tensor_bytes, _products(lean))) + norms == stored
    model.close()


def _weights(bits: int, *rows: int, columns: int = 128) -> list[QuantizedMatrix]:
    torch.manual_seed(1)
    return [quantize_matrix(torch.randn(count, columns) * 0.1 + 0.02, bits) for count in rows]


@pytest.mark.parametrize(
    ("rows", "count"), [((16,), 1), ((80, 32), 3), ((64, 48, 1040), 70), ((64, 48, 1040), 1), ((128, 192), 3)]
)
def test_products_of_several_matrices(
    rows: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rearranged in slabs; the last is smaller."""
    monkeypatch.setattr(linear, "_AT_ONCE", 128 * 128)
    weights = _weights(4, *rows)
    whole, bias = torch.cat([dequantize_matrix(weight) for weight in weights]), torch.randn(sum(rows))
    x = torch.randn(count, 128)
    expected = F.linear(x.double(), whole.double(), bias.double()).float()
    scratch = Scratch(max(rows) * 128, torch.float32, _CPU)
    assert torch.allclose(DequantizingLinear(weights, bias, scratch)(x), expected, atol=1e-5)
    error = Int4Linear(weights, bias)(x) - expected
    assert float(error.norm() / expected.norm()) < 0.006, "rows and scales in bfloat16"
    assert scratch.taken == 0


def test_each_product_has_its_weights() -> None:
    scratch = Scratch(1 << 16, torch.float32, _CPU)
    for weights in (_weights(3, 32), _weights(4, 24), _weights(4, 32, columns=96)):
        assert isinstance(make_linear(weights, None, lambda: scratch), DequantizingLinear)
    assert isinstance(make_linear(_weights(4, 8, 24), None, None), Int4Linear)
    assert isinstance(make_linear([torch.randn(8, 8)], None, None), DenseLinear)


@pytest.mark.skipif(not blocks.is_supported(), reason="this processor has no product of blocks")
@pytest.mark.parametrize(("bits", "count"), [(2, 1), (3, 33), (2, 130), (3, 130)])
def test_panels_give_the_product_with_their_values(bits: int, count: int) -> None:
    """In bfloat16, bit for bit, whatever bits a draft is quantized to."""
    weights = [quantize_matrix(torch.randn(rows, 192).bfloat16(), bits) for rows in (80, 16, 2100)]
    x, bias = torch.randn(count, 192).bfloat16(), torch.randn(2196).bfloat16()
    product = make_linear(weights, bias, None)
    assert isinstance(product, PanelLinear)
    assert tensor_bytes(product) == sum(weight.nbytes for weight in weights) + bias.nbytes
    expected = blocks.row_linear(x, torch.cat([dequantize_matrix(weight) for weight in weights])) + bias
    with poisoned():
        assert torch.equal(product(x), expected)


@pytest.mark.skipif(not tiles.has_tiles(), reason="this processor or torch has no such tiles")
@pytest.mark.parametrize(
    ("outputs", "inputs", "count"),
    [(64, 64, 1), (64, 64, 65), (192, 1088, 63), (192, 1088, 200), (960, 576, 13), (960, 576, 64)],
)
def test_many_rows_are_multiplied_in_tiles(
    outputs: int, inputs: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, as precisely as torch multiplies a few rows; in several pieces, too."""
    weight = quantize_matrix(torch.randn(outputs, inputs).bfloat16())
    x, bias = torch.randn(count, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    product = Int4Linear([weight], bias)
    truth = F.linear(x.double(), dequantize_matrix(weight).double(), bias.double())
    made = list[torch.Tensor]()
    for few in (0, count):
        monkeypatch.setattr(linear, "_FEW_ROWS", few)
        with poisoned():
            made.append(product(x))
    errors = [float((got.double() - truth).norm() / truth.norm()) for got in made]
    assert errors[0] < max(1.2 * errors[1], 0.006)
