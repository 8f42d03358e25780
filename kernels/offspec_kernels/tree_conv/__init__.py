"""Short causal convolution of each channel along the paths of a tree.

Letters: T rows, C channels, K taps, R rows of inputs.
"""

import torch
from torch import Tensor, int64

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_device, check_dtype, check_shape, check_tensor


def tree_conv(
    inputs: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    path: Backend | None = None,
) -> Tensor:
    """Return the weighted sum of the last K inputs of each row's path, its own included, [T, C] float32.

    Workspace: eager, a float32 copy of the weight, and of one input per thread; triton, none.

    Args:
        inputs: [R, C], inputs from before all rows first.
        window: [T, K] int64, indices of a row's inputs, its own last. Indices are not checked: a GPU kernel
            reads whatever memory they point to.
        weight: [C, K], a float of any size, like the bias.
        bias: [C], or None.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.
    """
    check_tensor("inputs", inputs, ["R", "C"], FLOATS)
    check_shape("weight", weight, [inputs.shape[1], "K"])
    check_shape("window", window, ["T", weight.shape[1]])
    for name, given in (("window", window), ("weight", weight), ("bias", bias)):
        if given is not None:
            check_device(name, given, inputs.device)
    if bias is not None:
        check_shape("bias", bias, [inputs.shape[1]])
        check_dtype("bias", bias, FLOATS)
    check_dtype("window", window, (int64,))
    check_dtype("weight", weight, FLOATS)
    chosen = choose_backend(inputs.device, path)
    if chosen == "eager" and inputs.device.type == "cpu":
        from offspec_kernels.tree_conv import native

        return native.tree_conv(inputs, window, weight, bias)
    if chosen == "triton":
        from offspec_kernels.tree_conv import triton

        return triton.tree_conv(inputs, window, weight, bias)
    out = torch.einsum("tkc,ck->tc", inputs.double()[window], weight.double())
    return (out if bias is None else out + bias.double()).float()
