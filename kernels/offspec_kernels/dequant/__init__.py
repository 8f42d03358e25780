"""Dequantization: stored weights to values that an ordinary product can use."""

from collections.abc import Mapping
from math import prod

from torch import Tensor, float16

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype
from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.errors import ArgumentError

__all__ = ["Format", "Part", "dequantize"]


def dequantize(
    format: Format, parts: Mapping[str, Tensor], shape: Shape, out: Tensor, *, path: Backend | None = None
) -> Tensor:
    """Return the weight [*shape] in the dtype of `out`, as a view of out's memory.

    In every backend the values equal those of the format's own library, bit for bit in float32, rounded once
    to out's dtype.

    Args:
        format: Storage format of the weight.
        parts: Tensors as `format.parts(shape)` lists them, contiguous, all on one device.
        shape: Shape of the weight.
        out: [elements of shape] float32, bfloat16 or float16, contiguous: a workspace that many weights may
            share.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: A part or argument is invalid; the error names it.
        PathError: `path` cannot run here.

    Workspace: the size of the scales, or a few hundred rows' values; reference, several times the weight in
    float32.
    """
    format.check({name: Part(part.dtype, tuple(part.shape)) for name, part in parts.items()}, shape)
    for name, part in parts.items():
        check_device(name, part, out.device)
        check_contiguous(name, part)
    check_dtype("out", out, FLOATS)
    values = prod(shape)
    if out.dim() != 1 or len(out) != values or not out.is_contiguous():
        raise ArgumentError("out", f"must be [{values}] and contiguous, not {list(out.shape)}")
    stored = out.view((*shape[:-2], shape[-1], shape[-2]) if format.transposed else shape)
    chosen = choose_backend(out.device, path)
    if values == 0:
        pass
    elif chosen == "triton":
        format.triton(parts, shape, stored)
    elif chosen == "eager" and out.device.type == "cpu" and out.dtype != float16:
        format.eager(parts, shape, stored)
    else:  # a device without triton, or a dtype that few CPUs process quickly
        reference = format.reference(parts, shape)
        stored.copy_(reference.mT if format.transposed else reference)
    return stored.mT if format.transposed else stored
