"""Products of a few rows with resident weights, each in the fastest layout for the machine.

A product of 16 rows is bound by memory bandwidth. oneDNN rearranges a matrix in checkpoint layout on every
call, which doubles the traffic; here it is rearranged once. 4-bit weights use torch's own 4-bit product,
which unpacks them in registers, again for every few rows. For more rows, on processors that multiply
bfloat16, they are unpacked a tile at a time.

Letters: T rows, N outputs, K inputs, G = 64 weights of a group.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from offspec.model.quantize.quantized_matrix import QuantizedMatrix, dequantize_matrix, quantize_matrix
from offspec.model.unpacking import Scratch
from offspec_kernels.dequant.grouped import GROUP, Grouped, unpack_codes
from offspec_kernels.dequant.grouped.tiles import TILE, has_tiles, multiply
from offspec_kernels.packed_linear import is_supported, packed_linear

LinearFunction = Callable[[torch.Tensor], torch.Tensor]  # x [T, K] to x @ w.T + bias [T, N]

_ROWS_HINT = 16  # row count for oneDNN's layout; other counts run equally well with it
_MIDDLE = 8  # zero point of codes in torch's 4-bit product
_TILE_ROWS = 16  # the number of outputs must be a multiple of it
_TILES = 4  # of 16 inputs that are adjacent on a CUDA device
_FOUR_BIT_DTYPE = torch.bfloat16  # of rows and scales
_FEW_ROWS = 12  # up to which torch's 4-bit product is faster than the one with tiles
_AT_ONCE = 1 << 22  # codes that are rearranged together, at four bytes each


class DenseLinear:
    """Product with weights [N, K] at 16 or 32 bits, in oneDNN's own layout if it has one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._packed = (
            weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_mkldnn_bf16_linear()
        )
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return F.linear(x, self._weight, self._bias)


class Int4Linear:
    """Product with 4-bit weights: codes in torch's layout, a scale and a zero point per group of a row.

    The only additional rounding is that of scales and zero points, and of a float32 model's rows, to
    bfloat16: torch's product is 40 times slower in float32, and draft tokens need not be exact.
    """

    def __init__(self, weights: Sequence[QuantizedMatrix], bias: torch.Tensor | None) -> None:
        first = weights[0].parts["codes"]
        self._bias = bias
        step, offset = (torch.cat([w.parts[name].float() for w in weights]) for name in ("step", "offset"))
        scales = torch.stack([step.T, (offset + _MIDDLE * step).T], dim=2)
        self._scales = scales.to(_FOUR_BIT_DTYPE)  # [K / G, N, 2]
        self._codes = _arranged(torch.cat([w.parts["codes"] for w in weights]))
        whole = first.device.type == "cpu" and self._scales.shape[1] % TILE == 0
        self._tiled = whole and has_tiles()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        rows = x.to(_FOUR_BIT_DTYPE)
        if self._tiled and len(x) > _FEW_ROWS:
            out = multiply(rows, self._codes, self._scales)
        elif x.device.type == "cuda":
            out = torch.ops.aten._weight_int4pack_mm(rows, self._codes, GROUP, self._scales)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._codes, GROUP, self._scales)
        out = out.to(x.dtype)
        return out if self._bias is None else out.add_(self._bias)


def _arranged(codes: torch.Tensor) -> torch.Tensor:
    """Rearrange codes in planes, uint8 [N, K / 2], to torch's layout for their device, in slabs of rows."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    height = max(_AT_ONCE // columns // 64, 1) * 64
    slabs = []
    for start in range(0, rows, height):
        slab = codes[start : start + height]
        values = unpack_codes(slab.view(-1, GROUP // 2), 4).view(len(slab), columns)
        if codes.device.type == "cuda":
            pairs = values[:, ::2] << 4 | values[:, 1::2]
            slabs.append(torch.ops.aten._convert_weight_to_int4pack(pairs, _TILES))
        else:
            slabs.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 2))
    return torch.cat(slabs)


class PanelLinear:
    """Product with quantized weights [N, K], unpacked and multiplied one panel at a time."""

    def __init__(self, weights: Sequence[QuantizedMatrix], bias: torch.Tensor | None) -> None:
        self._bias, self._format = bias, Grouped(weights[0].bits)
        self._parts = {name: torch.cat([w.parts[name] for w in weights]) for name in weights[0].parts}
        self._shape = sum(w.shape[0] for w in weights), weights[0].shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = packed_linear(x, self._format, self._parts, self._shape, self._bias)
        assert out is not None, "check is_supported first"
        return out


class DequantizingLinear:
    """Product with quantized weights, unpacked in each call, matrix by matrix, in a shared workspace."""

    def __init__(
        self, weights: Sequence[QuantizedMatrix], bias: torch.Tensor | None, scratch: Scratch
    ) -> None:
        self._weights, self._bias, self._scratch = weights, bias, scratch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outs = []
        for weight in self._weights:
            values = self._scratch.lend(weight.shape.numel())
            outs.append(F.linear(x, dequantize_matrix(weight, values)))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out if self._bias is None else out.add_(self._bias)


def make_linear(
    weights: Sequence[torch.Tensor | QuantizedMatrix],
    bias: torch.Tensor | None,
    room: Callable[[], Scratch] | None,
) -> LinearFunction:
    """Return the product with vertically stacked matrices [N_i, K].

    Args:
        weights: Matrices, either all quantized or none.
        bias: [sum of N_i], or None.
        room: Returns workspace for the values of quantized matrices, if they must be unpacked.
    """
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if dense:
        return DenseLinear(torch.cat(dense) if len(dense) > 1 else dense[0].clone(), bias)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    first = quantized[0]
    kind = select_quantized_linear(
        [w.shape for w in quantized], first.bits, first.parts["codes"].device, first.dtype
    )
    if kind is DequantizingLinear:
        assert room is not None, "unpacked values need workspace"
        return DequantizingLinear(quantized, bias, room())
    return (PanelLinear if kind is PanelLinear else Int4Linear)(quantized, bias)


def select_quantized_linear(
    shapes: Sequence[Sequence[int]], bits: int, device: torch.device, dtype: torch.dtype
) -> type[PanelLinear | Int4Linear | DequantizingLinear]:
    """Return the fastest product on a device for stacked quantized matrices of these shapes."""
    if any(len(shape) != 2 or shape[1] % GROUP for shape in shapes):
        return DequantizingLinear
    outputs = sum(shape[0] for shape in shapes)
    if bits == 4 and outputs % _TILE_ROWS == 0 and has_int4_matmul(device, dtype):
        return Int4Linear
    narrow = device.type == "cpu" and dtype == torch.bfloat16
    if narrow and is_supported(Grouped(bits), (outputs, shapes[0][1])):
        return PanelLinear
    return DequantizingLinear


@cache
def has_mkldnn_bf16_linear() -> bool:
    """Return whether torch multiplies bfloat16 matrices in oneDNN's layout correctly on this processor."""
    w = torch.arange(-32, 32).remainder(7).repeat(64, 1).to(torch.bfloat16)
    x = w[:3].flip(1)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(w, _ROWS_HINT)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(out.float(), F.linear(x, w).float(), rtol=0.02)


@cache
def has_int4_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies 4-bit weights correctly on a device.

    Assumed for a device that this machine does not have, for which a plan is made.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return True
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 2 * GROUP, generator=generator).to(device, dtype)
    x = torch.randn(3, 2 * GROUP, generator=generator).to(device, dtype)
    quantized = quantize_matrix(weight)
    try:
        out = Int4Linear([quantized], None)(x)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(out.float(), F.linear(x, dequantize_matrix(quantized)).float(), rtol=0.05, atol=0.5)
