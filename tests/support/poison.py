"""Poisoned memory, which shows reads of uninitialized values."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch.empty and Tensor.new_empty fill their tensors with NaN, or the largest integer."""

    def poisons(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*given: Any, **options: Any) -> Tensor:
            made = empty(*given, **options)
            return made.fill_(math.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)

        return poison

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisons(torch.empty))
        patch.setattr(torch.Tensor, "new_empty", poisons(torch.Tensor.new_empty))
        yield
