"""Products of a few rows with weights that stay where they are, each in the layout that is quickest here.

A product of 16 rows is bound by how fast the weights arrive. A matrix as it lies in a checkpoint is
rearranged on every call by oneDNN, which doubles that traffic; here it is rearranged once. Weights in 4 bits
go through torch's own product of such weights, which makes their values in registers, again for every few
rows; where the processor multiplies bfloat16, more rows have them made a tile at a time.

Letters: T rows, N outputs, K inputs, G = 64 weights of a group.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from offspec.model.quantize.rounding import RoundedMatrix, round_matrix, unpack
from offspec.model.unpacking import Scratch
from offspec_kernels.dequant.grouped import GROUP, Grouped, unpack_codes
from offspec_kernels.dequant.grouped.tiles import TILE, has_tiles, multiply
from offspec_kernels.packed_linear import has_panels, packed_linear

Product = Callable[[torch.Tensor], torch.Tensor]  # x [T, K] to x @ w.T + bias [T, N]

_ROWS_HINT = 16  # what oneDNN lays weights out for; other counts run as well with it
_MIDDLE = 8  # torch's 4-bit product takes codes around it
_TILE_ROWS = 16  # outputs are multiples of it
_TILES = 4  # of 16 inputs that lie together on a CUDA device
_FOUR_BIT_DTYPE = torch.bfloat16  # of rows and scales
_FEW_ROWS = 12  # up to which torch's 4-bit product is quicker than one that makes tiles
_AT_ONCE = 1 << 22  # codes that are rearranged together, four bytes each meanwhile


class DenseProduct:
    """With weights [N, K] at 16 or 32 bits, in oneDNN's own layout where it has one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack()
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


class FourBitProduct:
    """With weights in 4 bits: codes in torch's layout, a scale and a middle for each group of a row.

    What was rounded is rounded no more, but for scales and middles, and rows of a model in float32: torch's
    product is 40 times slower in float32, and draft tokens are hints.
    """

    def __init__(self, weights: Sequence[RoundedMatrix], bias: torch.Tensor | None) -> None:
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
    """Codes in planes, uint8 [N, K / 2], to torch's layout for their device, a slab of rows at a time."""
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


class PanelProduct:
    """With rounded weights [N, K] of which a panel of values at a time is made and multiplied."""

    def __init__(self, weights: Sequence[RoundedMatrix], bias: torch.Tensor | None) -> None:
        self._bias, self._format = bias, Grouped(weights[0].bits)
        self._parts = {name: torch.cat([w.parts[name] for w in weights]) for name in weights[0].parts}
        self._shape = sum(w.shape[0] for w in weights), weights[0].shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = packed_linear(x, self._format, self._parts, self._shape, self._bias)
        assert out is not None, "ask has_panels first"
        return out


class UnpackingProduct:
    """With rounded weights whose values are made for each call, matrix by matrix in shared scratch."""

    def __init__(self, weights: Sequence[RoundedMatrix], bias: torch.Tensor | None, scratch: Scratch) -> None:
        self._weights, self._bias, self._scratch = weights, bias, scratch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outs = []
        for weight in self._weights:
            values = self._scratch.lend(weight.shape.numel())
            outs.append(F.linear(x, unpack(weight, values)))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out if self._bias is None else out.add_(self._bias)


def product_of(
    weights: Sequence[torch.Tensor | RoundedMatrix],
    bias: torch.Tensor | None,
    room: Callable[[], Scratch] | None,
) -> Product:
    """The product with matrices [N_i, K] below one another.

    Args:
        weights: All of them rounded, or none.
        bias: [sum of N_i], or None.
        room: Gives scratch for the values of rounded ones, where those have to be made.
    """
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if dense:
        return DenseProduct(torch.cat(dense) if len(dense) > 1 else dense[0].clone(), bias)
    rounded = [weight for weight in weights if isinstance(weight, RoundedMatrix)]
    first = rounded[0]
    kind = rounded_kind([w.shape for w in rounded], first.bits, first.parts["codes"].device, first.dtype)
    if kind is UnpackingProduct:
        assert room is not None, "values need room"
        return UnpackingProduct(rounded, bias, room())
    return (PanelProduct if kind is PanelProduct else FourBitProduct)(rounded, bias)


def rounded_kind(
    shapes: Sequence[Sequence[int]], bits: int, device: torch.device, dtype: torch.dtype
) -> type[PanelProduct | FourBitProduct | UnpackingProduct]:
    """The product that is quickest there with rounded matrices of these shapes, below one another."""
    if any(len(shape) != 2 or shape[1] % GROUP for shape in shapes):
        return UnpackingProduct
    outputs = sum(shape[0] for shape in shapes)
    if bits == 4 and outputs % _TILE_ROWS == 0 and can_multiply_four_bits(device, dtype):
        return FourBitProduct
    narrow = device.type == "cpu" and dtype == torch.bfloat16
    if narrow and has_panels(Grouped(bits), (outputs, shapes[0][1])):
        return PanelProduct
    return UnpackingProduct


@cache
def can_pack() -> bool:
    """Whether this torch and this processor multiply bfloat16 matrices in oneDNN's layout, and rightly."""
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
def can_multiply_four_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies weights in 4 bits on this device, and rightly.

    Taken for granted of a device that is not there, for which a plan is made.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return True
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 2 * GROUP, generator=generator).to(device, dtype)
    x = torch.randn(3, 2 * GROUP, generator=generator).to(device, dtype)
    rounded = round_matrix(weight)
    try:
        out = FourBitProduct([rounded], None)(x)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.allclose(out.float(), F.linear(x, unpack(rounded)).float(), rtol=0.05, atol=0.5)
