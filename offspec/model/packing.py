"""Weights rounded to 4 bits: 16 even steps for each group of 64, placed where it matters least.

A group keeps one float16 step and one float16 offset: 4.5 bits a weight, as NF4 with float32 scales has.
Step and offset are fitted by weighted least squares, alternating with the codes; a weight counts by the
mean square of the input it meets, measured on a short text (the idea of llama.cpp's importance matrix and
of AWQ: Lin et al. 2023, arXiv 2306.00978). `bench/rounding.py` compares this with NF4.
"""

from dataclasses import dataclass

import torch

GROUP = 64
_LEVELS = 16
_SPREADS = (1.0, 0.88)  # of the group's range, to begin from
_ROUNDS = 3
_GROUPS_AT_A_TIME = 1 << 14  # bounds the float32 scratch of rounding and unpacking


@dataclass(frozen=True, slots=True)
class Packed:
    """A rounded tensor. codes [n / 2] uint8, two a byte, the first in the high half; step and offset
    [n / 64] float16; n = the elements of `shape`, padded to whole groups."""

    codes: torch.Tensor
    step: torch.Tensor
    offset: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.step.nbytes + self.offset.nbytes


def packed_bytes(elements: int) -> int:
    """Bytes of a rounded tensor of so many elements."""
    return -(-elements // GROUP) * (GROUP // 2 + 4)


def pack(weight: torch.Tensor, importance: torch.Tensor | None = None) -> Packed:
    """Round a tensor of any shape. importance broadcasts to that shape; None counts all weights alike."""
    if importance is None or not float(importance.sum()) > 0:
        importance = torch.ones(1, device=weight.device)
    matter = (importance / importance.mean() + 1e-4).expand(weight.shape)
    count = -(-weight.numel() // GROUP)
    codes = torch.empty(count, GROUP // 2, dtype=torch.uint8, device=weight.device)
    step = torch.empty(count, 1, dtype=torch.float16, device=weight.device)
    offset = torch.empty_like(step)
    done = 0
    for rows in _slabs(weight):
        groups = _grouped(weight[rows])
        part = slice(done, done + len(groups))
        code, step[part], offset[part] = _round(groups, _grouped(matter[rows]))
        codes[part] = (code[:, ::2] << 4) | code[:, 1::2]
        done = part.stop
    return Packed(codes.view(-1), step.view(-1), offset.view(-1), weight.shape, weight.dtype)


def _slabs(weight: torch.Tensor) -> list[slice]:
    """Row ranges that hold whole groups, none of them large; one range where groups straddle rows."""
    row = weight[0].numel()
    if row % GROUP:
        return [slice(0, len(weight))]
    height = max(_GROUPS_AT_A_TIME * GROUP // row, 1)
    return [slice(start, start + height) for start in range(0, len(weight), height)]


def _grouped(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] to [groups, 64] in float32, the last group padded with zeros."""
    flat = tensor.reshape(-1).float()
    short = -len(flat) % GROUP
    return (torch.nn.functional.pad(flat, (0, short)) if short else flat).view(-1, GROUP)


def _round(w: torch.Tensor, matter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [B, 64] uint8, steps and offsets [B, 1] float16 of the groups w [B, 64]."""
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    matter = matter / matter.sum(1, keepdim=True).clamp_min(1e-30)
    mean = (matter * w).sum(1, keepdim=True)
    least = torch.full_like(mean, torch.inf)
    best = [torch.zeros_like(w), torch.zeros_like(mean), torch.zeros_like(mean)]
    for spread in _SPREADS:
        step = ((high - low) * spread / (_LEVELS - 1)).clamp_min(1e-7)
        offset = (low + high) / 2 - step * ((_LEVELS - 1) / 2)
        for _ in range(_ROUNDS):
            code = ((w - offset) / step).round_().clamp_(0, _LEVELS - 1)
            centre = (matter * code).sum(1, keepdim=True)
            apart = code - centre
            step = (matter * apart * (w - mean)).sum(1, keepdim=True)
            step = (step / (matter * apart.square()).sum(1, keepdim=True).clamp_min(1e-12)).clamp_min(1e-7)
            offset = mean - step * centre
        kept_step, kept_offset = _half(step), _half(offset)
        error = (matter * (code * kept_step + kept_offset - w).square_()).sum(1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        found = (code, kept_step, kept_offset)
        best = [torch.where(better, new, old) for new, old in zip(found, best, strict=True)]
    return best[0].to(torch.uint8), best[1].half(), best[2].half()


def _half(x: torch.Tensor) -> torch.Tensor:
    """As float16 will hold it, finite."""
    return x.clamp(-65000, 65000).half().float()


def unpack(packed: Packed) -> torch.Tensor:
    """The rounded weights in their own shape and dtype: code · step + offset in float32, rounded once."""
    groups = packed.step.numel()
    out = torch.empty(groups, GROUP, dtype=packed.dtype, device=packed.codes.device)
    codes = packed.codes.view(groups, GROUP // 2)
    for start in range(0, groups, _GROUPS_AT_A_TIME):
        part = slice(start, start + _GROUPS_AT_A_TIME)
        step, offset = packed.step[part, None].float(), packed.offset[part, None].float()
        for half, code in enumerate((codes[part] >> 4, codes[part] & 15)):
            out[part, half::2] = torch.addcmul(offset, code.float(), step).to(packed.dtype)
    return out.view(-1)[: packed.shape.numel()].view(packed.shape)
