"""Decorator for functions that torch function modes need not intercept, which saves their overhead.

`RowIndependentFunctions` and `RowProducts` are called for every function and tensor property, some 250 in a
layer, and change two or three of them. Such a call takes longer than many a function, so code that needs
neither mode bypasses both.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def bypass_function_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with torch function modes disabled while it runs."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
