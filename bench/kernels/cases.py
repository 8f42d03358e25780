"""Cases of the kernels bench: an operation at some sizes, other implementations, and a result check."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.kernels.timing import Call
from bench.lib.cgroup import BenchError
from offspec_kernels.backend import Backend

OURS = "offspec"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Spec:
    """An operation at some sizes, written as op:sizes:dtype, such as `gumbel_argmax:512,128256:bfloat16`."""

    op: str
    sizes: tuple[int, ...]
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{self.op}:{','.join(map(str, self.sizes))}:{self.dtype}"

    @property
    def kind(self) -> torch.dtype:
        kind: torch.dtype = getattr(torch, self.dtype)
        return kind


@dataclass(frozen=True, slots=True)
class Setting:
    """Device and options of a case.

    path: None for the default backend. spread: standard deviation of the attention's scores. rivals: whether
    other implementations are included.
    """

    device: torch.device
    path: Backend | None = None
    spread: float = 1.0
    rivals: bool = True

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Return standard normal numbers, float32, the same on every device."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """A case that is ready to run.

    Args:
        flops, nbytes: Minimum work: each input is read and each output written once.
        ways: Our implementation and the others, each returning its result.
        reference: The exact result, affordable at small sizes only.
        error: Error of (found, wanted).
        limit: Maximum error.
        look: Runs a call that changes its arguments from its initial state; returns comparable results.
        facts: More figures for the record and the notes, complete after each way has run once.
    """

    flops: float
    nbytes: int
    ways: dict[str, Call]
    reference: Call
    error: Callable[[Any, Any], float]
    limit: float
    look: Callable[[Call], Any] = lambda call: call()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Op:
    """Construction of an operation's cases.

    Args:
        names: Names of its sizes.
        small: Sizes that the check against the reference replaces; the others, such as heads, are kept.
        build: Builds a case.
        entry_point: Returns the public function.
    """

    names: tuple[str, ...]
    small: dict[str, int]
    build: Callable[[Spec, Setting], Case]
    entry_point: Callable[[], Callable[..., Any]]

    def shrunk(self, spec: Spec) -> Spec:
        """Return the operation at sizes small enough for the reference."""
        sizes = (
            min(size, self.small.get(name, size)) for name, size in zip(self.names, spec.sizes, strict=True)
        )
        return Spec(spec.op, tuple(sizes), spec.dtype)

    def stated_scratch(self) -> str:
        """Return the docstring's paragraph about scratch memory."""
        paragraphs = (inspect.getdoc(self.entry_point()) or "").split("\n\n")
        found = [paragraph for paragraph in paragraphs if re.match("(Peak )?scratch", paragraph, re.I)]
        return " ".join(found[0].split()) if found else "not documented"


def parse_spec(text: str, ops: dict[str, Op]) -> Spec:
    """Parse `op:sizes` or `op:sizes:dtype`. Raises BenchError."""
    op, _, rest = text.partition(":")
    sizes, _, dtype = rest.partition(":")
    if op not in ops:
        raise BenchError(f"unknown operation in {text!r}: use one of {', '.join(ops)}")
    names = ops[op].names
    numbers = sizes.split(",")
    if len(numbers) != len(names) or not all(number.isdecimal() and int(number) for number in numbers):
        raise BenchError(f"{text!r} must be {op}:{','.join(names)}, each above 0, optionally with :dtype")
    if dtype and dtype not in DTYPES:
        raise BenchError(f"{text!r} must end with one of {', '.join(DTYPES)}")
    return Spec(op, tuple(map(int, numbers)), dtype or "bfloat16")


def rms_ratio(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to `wanted`'s; NaN if either contains NaN."""
    wide = wanted.double()
    return float((found.double() - wide).norm() / wide.norm())


def mismatch_share(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the share of entries that differ."""
    return float((found != wanted).double().mean())


def levels(rows: int, first: int, most: int = 32) -> list[int]:
    """Return positions of a tree's `rows` nodes, spread evenly over at most `most` levels."""
    return [first + row * min(rows, most) // rows for row in range(rows)]


def scattered(rows: int, start: int, end: int) -> list[int]:
    """Return `rows` ascending rows of a tree at [start, end), spread over the whole tree."""
    if end - start < rows:
        raise BenchError(f"a path of {rows} rows does not fit in a tree of {end - start}")
    return [start + (row + 1) * (end - start) // rows - 1 for row in range(rows)]


def filter_specs(specs: Sequence[Spec], ops: Sequence[str] | None) -> list[Spec]:
    """Return the specs of some operations, or all."""
    return [spec for spec in specs if ops is None or spec.op in ops]
