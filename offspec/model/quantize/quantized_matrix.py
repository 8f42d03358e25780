"""Quantization of weights to few bits with uniform steps per group of 64, fitted by importance.

A group has one float16 step and one float16 offset, half a bit per weight. `offspec_kernels.dequant.grouped`
describes the layout of the codes. Step and offset are fitted by weighted least squares, alternating with the
codes. The importance of a weight is the mean square of its input, measured on a short text, as in llama.cpp's
importance matrix and AWQ (Lin et al. 2023, arXiv 2306.00978). `bench/LOG.md` compares this with other
quantization methods.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from offspec.model.unpacking import is_read_directly
from offspec_kernels.dequant import Part, dequantize
from offspec_kernels.dequant.grouped import GROUP, Grouped, pack_codes

# Initial fractions of the group's range: the fewer steps there are, the more clipping helps.
_SPREADS = {2: (0.8, 0.6), 3: (0.95, 0.8), 4: (1.0, 0.88), 8: (1.0,)}
_ROUNDS = 3
_GROUPS_AT_A_TIME = 1 << 14  # limits the temporary float32 memory of quantization


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Quantized tensor: the parts of `Grouped(bits)`, and the shape and dtype of its values.

    If rows do not consist of whole groups, the parts are those of all values in a single row.
    """

    bits: int
    parts: dict[str, torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def is_quantizable(name: str, shape: Sequence[int]) -> bool:
    """Return whether a weight is quantized: a matrix, or a stack of matrices, of whole groups.

    Weights of convolutions and Mamba's `dt_proj` are not quantized. They are small, and layers read them
    without running their module, so they would not be unpacked.
    """
    return len(shape) >= 2 and shape[-2] != 1 and not is_read_directly(name) and math.prod(shape) % GROUP == 0


def _in_groups(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape itself, or the shape of all values in a single row if a group would span two rows."""
    return tuple(shape) if shape[-1] % GROUP == 0 else (1, math.prod(shape))


def quantized_parts(shape: Sequence[int], bits: int) -> Mapping[str, Part]:
    """Return the parts of a quantized tensor of this shape, by name."""
    return Grouped(bits).parts(_in_groups(shape))


def quantized_bytes(shape: Sequence[int], bits: int) -> int:
    """Return the bytes of a quantized tensor of this shape."""
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in quantized_parts(shape, bits).values())


def quantize_matrix(
    weight: torch.Tensor, bits: int = 4, importance: torch.Tensor | None = None
) -> QuantizedMatrix:
    """Quantize a tensor to few bits.

    Temporary memory: some tens of megabytes, or several times the tensor if groups span rows.

    Args:
        weight: Tensor of whole groups.
        bits: 2, 3 or 4. Default 4.
        importance: Weight of each squared error, in a shape that broadcasts to the tensor's. Default: equal
            weights.
    """
    parts = {
        name: torch.empty(part.shape, dtype=part.dtype, device=weight.device)
        for name, part in quantized_parts(weight.shape, bits).items()
    }
    for slab, code, step, offset in _slabs(weight, bits, importance):
        for name, found in (("codes", pack_codes(code, bits)), ("step", step), ("offset", offset)):
            parts[name][slab] = found.view(-1, parts[name].shape[1])
    return QuantizedMatrix(bits, parts, weight.shape, weight.dtype)


def _slabs(
    weight: torch.Tensor, bits: int, importance: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield slices of the rows with their codes [B, 64] uint8, steps and offsets [B, 1] float16."""
    assert weight.numel() % GROUP == 0, "the tensor does not consist of whole groups"
    if importance is None or not float(importance.sum()) > 0:
        importance = torch.ones(1, device=weight.device)
    columns = _in_groups(weight.shape)[-1]
    weighting = (importance / importance.mean() + 1e-4).expand(weight.shape).reshape(-1, columns)
    flat, height = weight.reshape(-1, columns), max(_GROUPS_AT_A_TIME * GROUP // columns, 1)
    for start in range(0, len(flat), height):
        slab = slice(start, start + height)
        yield slab, *_quantize_groups(_groups(flat[slab]), _groups(weighting[slab]), bits)


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """Reshape rows [n, columns] to groups [n * columns / 64, 64] in float32."""
    return rows.reshape(-1, GROUP).float()


def _quantize_groups(
    w: torch.Tensor, weighting: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize groups w [B, 64] to codes [B, 64] uint8, steps and offsets [B, 1] float16."""
    last = (1 << bits) - 1
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    weighting = weighting / weighting.sum(1, keepdim=True).clamp_min(1e-30)
    mean = (weighting * w).sum(1, keepdim=True)
    least = torch.full_like(mean, torch.inf)
    best = [torch.zeros_like(w), torch.zeros_like(mean), torch.zeros_like(mean)]
    for spread in _SPREADS[bits]:
        step = ((high - low) * spread / last).clamp_min(1e-7)
        offset = (low + high) / 2 - step * (last / 2)
        for _ in range(_ROUNDS):
            code = _nearest(w, step, offset, last)
            centre = (weighting * code).sum(1, keepdim=True)
            deviation = code - centre
            step = (weighting * deviation * (w - mean)).sum(1, keepdim=True)
            variance = (weighting * deviation.square()).sum(1, keepdim=True)
            step = (step / variance.clamp_min(1e-12)).clamp_min(1e-7)
            offset = mean - step * centre
        step, offset = _half(step), _half(offset)
        code = _nearest(w, step, offset, last)
        error = (weighting * (code * step + offset - w).square_()).sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        found = (code, step, offset)
        best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
    return best[0].to(torch.uint8), best[1].half(), best[2].half()


def _nearest(w: torch.Tensor, step: torch.Tensor, offset: torch.Tensor, last: int) -> torch.Tensor:
    return ((w - offset) / step).round_().clamp_(0, last)


def _half(x: torch.Tensor) -> torch.Tensor:
    """Round to finite float16 values."""
    return x.clamp(-65000, 65000).half().float()


def dequantize_matrix(packed: QuantizedMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the values in the original shape and dtype: code · step + offset in float32, rounded once.

    Args:
        packed: Result of `quantize_matrix`.
        out: Flat memory of the same dtype and number of elements, of which the result is a view. Default: new
            memory.
    """
    if out is None:
        device = packed.parts["codes"].device
        out = torch.empty(packed.shape.numel(), dtype=packed.dtype, device=device)
    return dequantize(Grouped(packed.bits), packed.parts, _in_groups(packed.shape), out).view(packed.shape)
