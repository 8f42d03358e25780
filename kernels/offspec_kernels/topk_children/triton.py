"""Most likely children on a GPU: the maximum of each block of 128 columns, then only the best blocks.

Letters: W rows, V columns, n = ceil(V / 128) blocks, K children. The first kernel reads the logits once and
writes two numbers per block. The second takes the K blocks with the largest maxima, which contain the K
largest of the row, and recomputes x there.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.noise import LOW
from offspec_kernels.noise.triton import gumbel_noise, gumbel_run
from offspec_kernels.transfer import upload
from offspec_kernels.triton_sort_keys import NOTHING, key_id, key_score, keys

BLOCK = 128  # columns summarized by their maximum first
_BLOCK = tl.constexpr(BLOCK)

_GROUP = 8  # blocks per program of the first kernel
_SHARING = 8  # rows per program, which generates the noise once per position


@triton.jit(do_not_specialize=["rows", "slots", "key_low", "key_high"])
def _survey(
    logits, stride, positions, table, maxima, sums, rows, size, blocks, tau, slots, key_low, key_high,
    NOISY: tl.constexpr, KEPT: tl.constexpr, GROUP: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Write maxima, and sums of exp((x - maximum) / tau), [W, n], for GROUP blocks of up to SHARING rows."""
    group = tl.program_id(0)
    block = group * GROUP + tl.arange(0, GROUP)  # [GROUP]
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]  # [GROUP, 128]
    first = tl.program_id(1) * SHARING
    noise = tl.zeros([GROUP, _BLOCK], tl.float32)
    made = tl.full((), -1, tl.int64)  # the position of the noise
    for row in range(first, tl.minimum(first + SHARING, rows)):
        start = logits + tl.cast(row, tl.int64) * stride
        x = tl.load(start + token, mask=token < size, other=-float("inf")).to(tl.float32)
        if NOISY:
            position = tl.load(positions + row)
            if position != made:
                if KEPT:
                    noise = tl.load(table + (position % slots) * size + token, mask=token < size, other=0.0)
                else:
                    quad = group * (GROUP * _BLOCK // 4) + tl.arange(0, GROUP * _BLOCK // 4)
                    noise = tl.reshape(gumbel_run(quad, position, key_low, key_high), [GROUP, _BLOCK])
                made = position
            x += noise
        top = tl.max(x, 1)
        away = tl.where(top == -float("inf"), 0.0, top)  # a block without scores has a sum of 0
        total = tl.sum(tl.exp((x - away[:, None]) / tau), 1)
        place = tl.cast(row, tl.int64) * blocks + block
        tl.store(maxima + place, top, mask=block < blocks)
        tl.store(sums + place, total, mask=block < blocks)


@triton.jit(do_not_specialize=["slots", "key_low", "key_high"])
def _pick(
    logits, stride, positions, table, maxima, sums, tokens, relatives, log_probs, size, blocks, tau,
    slots, key_low, key_high,
    NOISY: tl.constexpr, KEPT: tl.constexpr, COUNT: tl.constexpr, CHOSEN: tl.constexpr, WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find the children of one row in CHOSEN = min(K, n) of its blocks; WIDE and BLOCKS are padded sizes."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    maximum = tl.load(maxima + row * blocks + block, mask=block < blocks, other=-float("inf"))
    total = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(maximum, 0)
    total = tl.log(tl.sum(total * tl.exp((maximum - top) / tau), 0))

    open_blocks = tl.where(block < blocks, keys(maximum, block), NOTHING)
    number = tl.arange(0, WIDE)
    chosen = tl.zeros([WIDE], tl.int64)
    for k in range(CHOSEN):
        best = tl.max(open_blocks, 0)
        chosen = tl.where(number == k, key_id(best), chosen)
        open_blocks = tl.where(open_blocks == best, NOTHING, open_blocks)

    token = chosen[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]  # [WIDE, 128]
    inside = (number < CHOSEN)[:, None] & (token < size)
    x = tl.load(logits + row * stride + token, mask=inside, other=-float("inf")).to(tl.float32)
    if NOISY:
        position = tl.load(positions + row)
        if KEPT:
            x += tl.load(table + (position % slots) * size + token, mask=inside, other=0.0)
        else:
            x += gumbel_noise(token, position, key_low, key_high)
    open_tokens = tl.where(inside, keys(x, token), NOTHING)
    for k in range(COUNT):
        best = tl.max(tl.max(open_tokens, 1), 0)
        relative = key_score(best) - top
        tl.store(tokens + row * COUNT + k, key_id(best))
        tl.store(relatives + row * COUNT + k, relative)
        tl.store(log_probs + row * COUNT + k, relative / tau - total)
        open_tokens = tl.where(open_tokens == best, NOTHING, open_tokens)


def children(
    logits: Tensor,
    count: int,
    seed: int | None,
    positions: Sequence[int] | Tensor | None,
    tau: float,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, relative and log_prob of `topk_children`."""
    (width, size), device = logits.shape, logits.device
    blocks = triton.cdiv(size, BLOCK)
    maxima, sums = torch.empty(2, width, blocks, device=device)
    tokens = torch.empty(width, count, dtype=torch.int64, device=device)
    relatives, log_probs = torch.empty(2, width, count, device=device)
    if width == 0:
        return tokens, relatives, log_probs
    where = positions
    if not isinstance(where, Tensor):
        (where,) = upload([() if where is None else where], device)
    noisy, key = seed is not None, seed or 0
    kept = where if table is None else table
    shared = (logits, logits.stride(0), where, kept, maxima, sums)
    scalars = (size, blocks, tau, len(kept), key & LOW, key >> 32)
    sharing = _SHARING if noisy else 1
    chosen = min(count, blocks)
    with torch.cuda.device_of(logits):
        # Fused multiply-adds would change the bits of the noise from torch's.
        _survey[(triton.cdiv(blocks, _GROUP), triton.cdiv(width, sharing))](
            *shared, width, *scalars,
            NOISY=noisy, KEPT=table is not None, GROUP=_GROUP, SHARING=sharing,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _pick[(width,)](
            *shared, tokens, relatives, log_probs, *scalars,
            NOISY=noisy, KEPT=table is not None, COUNT=count, CHOSEN=chosen,
            WIDE=triton.next_power_of_2(chosen), BLOCKS=triton.next_power_of_2(blocks),
            num_warps=8 if chosen <= 32 else 16, enable_fp_fusion=False,
        )  # fmt: skip
    return tokens, relatives, log_probs
