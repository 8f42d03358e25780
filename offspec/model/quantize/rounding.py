"""Weights rounded to few bits: even steps for each group of 64, placed where they matter most.

A group keeps one float16 step and one float16 offset, half a bit a weight; `offspec_kernels.dequant.grouped`
says how codes lie. Step and offset are fitted by weighted least squares, alternating with the codes; a weight
counts by the mean square of the input it meets, measured on a short text (the idea of llama.cpp's importance
matrix and of AWQ: Lin et al. 2023, arXiv 2306.00978). `bench/LOG.md` compares this with other roundings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from offspec.model.unpacking import is_read_directly
from offspec_kernels.dequant import Part, dequantise
from offspec_kernels.dequant.grouped import GROUP, Grouped, pack_codes

# Of the group's range, to begin from: the fewer steps there are, the more it pays to cut its ends off.
_SPREADS = {2: (0.8, 0.6), 3: (0.95, 0.8), 4: (1.0, 0.88), 8: (1.0,)}
_ROUNDS = 3
_GROUPS_AT_A_TIME = 1 << 14  # bounds the float32 scratch of rounding


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A rounded tensor: the parts of `Grouped(bits)`, and the shape and dtype that its values have.

    Where rows are no whole groups, the parts are those of all values in one row.
    """

    bits: int
    parts: dict[str, torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def packs(name: str, shape: Sequence[int]) -> bool:
    """Return whether a weight is rounded: a matrix, or a stack of them, of whole groups.

    Weights of convolutions and Mamba's `dt_proj` are not. They are small, and layers read them without
    running their module, which is when packed weights are unpacked.
    """
    return len(shape) >= 2 and shape[-2] != 1 and not is_read_directly(name) and math.prod(shape) % GROUP == 0


def _in_groups(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape itself, or that of all values in one row, where a group would straddle two."""
    return tuple(shape) if shape[-1] % GROUP == 0 else (1, math.prod(shape))


def packed_parts(shape: Sequence[int], bits: int) -> Mapping[str, Part]:
    """The parts of a rounded tensor of this shape, by name."""
    return Grouped(bits).parts(_in_groups(shape))


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a rounded tensor of this shape."""
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in packed_parts(shape, bits).values())


def round_matrix(
    weight: torch.Tensor, bits: int = 4, importance: torch.Tensor | None = None
) -> RoundedMatrix:
    """Round a tensor to few bits.

    Scratch: some tens of megabytes, or several times the tensor where groups straddle rows.

    Args:
        weight: Of whole groups.
        bits: 2, 3 or 4, the default.
        importance: Weight of each squared error, broadcast to that shape; None counts all alike.
    """
    parts = {
        name: torch.empty(part.shape, dtype=part.dtype, device=weight.device)
        for name, part in packed_parts(weight.shape, bits).items()
    }
    for slab, code, step, offset in _slabs(weight, bits, importance):
        for name, found in (("codes", pack_codes(code, bits)), ("step", step), ("offset", offset)):
            parts[name][slab] = found.view(-1, parts[name].shape[1])
    return RoundedMatrix(bits, parts, weight.shape, weight.dtype)


def _slabs(
    weight: torch.Tensor, bits: int, importance: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slices of the rows, with their codes [B, 64] uint8, steps and offsets [B, 1] float16."""
    assert weight.numel() % GROUP == 0, "it has no whole groups"
    if importance is None or not float(importance.sum()) > 0:
        importance = torch.ones(1, device=weight.device)
    columns = _in_groups(weight.shape)[-1]
    matter = (importance / importance.mean() + 1e-4).expand(weight.shape).reshape(-1, columns)
    flat, height = weight.reshape(-1, columns), max(_GROUPS_AT_A_TIME * GROUP // columns, 1)
    for start in range(0, len(flat), height):
        slab = slice(start, start + height)
        yield slab, *_round(_groups(flat[slab]), _groups(matter[slab]), bits)


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """[n, columns] to [n * columns / 64, 64] in float32."""
    return rows.reshape(-1, GROUP).float()


def _round(
    w: torch.Tensor, matter: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [B, 64] uint8, steps and offsets [B, 1] float16 of the groups w [B, 64]."""
    last = (1 << bits) - 1
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    matter = matter / matter.sum(1, keepdim=True).clamp_min(1e-30)
    mean = (matter * w).sum(1, keepdim=True)
    least = torch.full_like(mean, torch.inf)
    best = [torch.zeros_like(w), torch.zeros_like(mean), torch.zeros_like(mean)]
    for spread in _SPREADS[bits]:
        step = ((high - low) * spread / last).clamp_min(1e-7)
        offset = (low + high) / 2 - step * (last / 2)
        for _ in range(_ROUNDS):
            code = _nearest(w, step, offset, last)
            centre = (matter * code).sum(1, keepdim=True)
            apart = code - centre
            step = (matter * apart * (w - mean)).sum(1, keepdim=True)
            step = (step / (matter * apart.square()).sum(1, keepdim=True).clamp_min(1e-12)).clamp_min(1e-7)
            offset = mean - step * centre
        step, offset = _half(step), _half(offset)
        code = _nearest(w, step, offset, last)
        error = (matter * (code * step + offset - w).square_()).sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        found = (code, step, offset)
        best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
    return best[0].to(torch.uint8), best[1].half(), best[2].half()


def _nearest(w: torch.Tensor, step: torch.Tensor, offset: torch.Tensor, last: int) -> torch.Tensor:
    return ((w - offset) / step).round_().clamp_(0, last)


def _half(x: torch.Tensor) -> torch.Tensor:
    """As float16 will hold it, finite."""
    return x.clamp(-65000, 65000).half().float()


def unpack(packed: RoundedMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rounded weights in their own shape and dtype: code · step + offset in float32, rounded once.

    Args:
        packed: What `round_matrix` gives.
        out: Flat memory of that dtype for as many elements, which the result is a view of; None: new memory.
    """
    if out is None:
        device = packed.parts["codes"].device
        out = torch.empty(packed.shape.numel(), dtype=packed.dtype, device=device)
    return dequantise(Grouped(packed.bits), packed.parts, _in_groups(packed.shape), out).view(packed.shape)
