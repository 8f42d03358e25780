"""Activation functions whose values do not depend on where in a tensor a number stands.

torch computes SiLU, GELU and the sigmoid with vectors of several numbers, and what is left over at the end of
each thread's share one by one, by another formula: in float32 one value in 25 differs in its last bit, of the
exact GELU one in three. Shares end where the number of rows and of threads have it. So a call gets sizes at
which every share is a whole number of vectors.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

VECTOR = 64  # numbers that torch takes at once, at most: two vectors of 32 bfloat16
_SHARE = 1 << 15  # numbers up to which one thread takes them all (at::internal::GRAIN_SIZE)
_ALONE = 1 << 14  # the same of GELU, which gives every thread a share of more
_MODULES = ("torch.nn.modules.activation", "transformers.activations")

Function = Callable[[torch.Tensor], torch.Tensor]


def make_even(model: torch.nn.Module) -> None:
    """Have the activations of `model` computed so, on a CPU."""
    for module in model.modules():
        leaf = not [*module.children(), *module.parameters()]
        if leaf and type(module).__module__ in _MODULES:
            forward: Function = module.forward
            module.forward = lambda values, forward=forward: evenly(forward, values)


def evenly(function: Function, values: torch.Tensor) -> torch.Tensor:
    """function(values [..., I]), an elementwise one, so that no value depends on its place."""
    if values.device.type != "cpu" or values.dim() == 0 or values.numel() == 0:
        return function(values)
    width = values.shape[-1]
    if width % VECTOR:
        return evenly(function, F.pad(values, (0, -width % VECTOR)))[..., :width]
    flat = values.contiguous().view(-1)  # with gaps, the exact GELU is another library's
    pieces = [function(piece) for piece in _pieces(flat)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(values.shape)


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """Cut a multiple of VECTOR numbers where every thread's share of a piece is one, too."""
    count, threads = len(flat), torch.get_num_threads()
    if count <= _ALONE:
        return [flat]
    unit = VECTOR * math.lcm(threads, min(threads, -(-count // _SHARE)))
    most = count - count % unit
    if most == count:
        return [flat]
    if -(-most // _SHARE) != -(-count // _SHARE) or most == 0:  # shared among fewer then
        most = max(most // _ALONE, 1) * _ALONE
        return [*flat[:most].split(_ALONE), *_pieces(flat[most:])]
    return [flat[:most], *_pieces(flat[most:])]
