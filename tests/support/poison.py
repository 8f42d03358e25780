"""Memory that shows who reads it before it was written."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch.empty gives is NaN, or the largest integer."""
    empty = torch.empty

    def poison(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(math.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poison)
        yield
