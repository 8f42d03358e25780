"""The convolution on a GPU: a program sums some channels of one row, tap by tap.

Letters: T rows, C channels, K taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 256


@triton.jit(do_not_specialize=["channels"])
def _tree_conv(
    inputs, window, weight, bias, out, channels, input_stride, window_row, window_tap, weight_stride,
    weight_tap, TAPS: tl.constexpr, BIASED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        taken = tl.load(window + row * window_row + tap * window_tap)
        x = tl.load(inputs + taken * input_stride + channel, mask=inside, other=0.0)
        w = tl.load(weight + channel * weight_stride + tap * weight_tap, mask=inside, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, total, mask=inside)


def tree_conv(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (rows, taps), channels = window.shape, inputs.shape[1]
    out = torch.empty((rows, channels), dtype=torch.float32, device=inputs.device)
    if rows * channels == 0:
        return out
    with torch.cuda.device_of(inputs):
        _tree_conv[(rows, triton.cdiv(channels, _CHANNELS))](
            inputs, window, weight, weight if bias is None else bias.contiguous(), out, channels,
            inputs.stride(0), *window.stride(), *weight.stride(),
            TAPS=taps, BIASED=bias is not None, CHANNELS=_CHANNELS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out
