"""Where modes of torch's functions look, and where they need not: a look takes longer than many a function.

`EvenFunctions` and `RowProducts` are asked about every function and every property of a tensor, some 250 in
a layer, of which they change two or three. What is known to need neither runs without them.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def never_watched(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which no mode has anything to change."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
