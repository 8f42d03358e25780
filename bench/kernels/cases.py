"""What the kernels bench measures: an operation at some sizes, its rivals, and how a result is judged."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.kernels.clock import Call
from bench.lib.cgroup import BenchError
from offspec_kernels.backend import Backend

OURS = "offspec"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Spec:
    """An operation at these sizes; written as op:sizes:dtype, as in `gumbel_argmax:512,128256:bfloat16`."""

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
    """Where and how a case runs.

    path: None is what the door chooses. spread: standard deviation of the attention's scores. rivals: whether
    they are wanted.
    """

    device: torch.device
    path: Backend | None = None
    spread: float = 1.0
    rivals: bool = True

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Standard normal numbers, float32, the same on every device."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device)


@dataclass(frozen=True, slots=True)
class Case:
    """Work that is ready to run.

    flops and nbytes: the least that it takes, each input read and each output written once. ways: ours and
    the rivals', each giving what it computed. reference: the truth, affordable at small sizes only.
    error(found, wanted) is to be at most `limit`. look(call) runs a call from the beginning and gives what
    can be compared, for what changes its arguments. facts: for the record and the notes, complete when each
    way has run once.
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
    """How cases of an operation are made.

    names: of its sizes. small: of the sizes, what the check against the reference puts in place of the
    timed ones; the others, as the heads, are part of what is checked. door: the public function.
    """

    names: tuple[str, ...]
    small: dict[str, int]
    build: Callable[[Spec, Setting], Case]
    door: Callable[[], Callable[..., Any]]

    def shrunk(self, spec: Spec) -> Spec:
        """The same operation, small enough for the reference."""
        sizes = (
            min(size, self.small.get(name, size)) for name, size in zip(self.names, spec.sizes, strict=True)
        )
        return Spec(spec.op, tuple(sizes), spec.dtype)

    def stated_scratch(self) -> str:
        """What the docstring says of scratch memory: the paragraph that begins with it."""
        paragraphs = (inspect.getdoc(self.door()) or "").split("\n\n")
        found = [paragraph for paragraph in paragraphs if re.match("(Peak )?scratch", paragraph, re.I)]
        return " ".join(found[0].split()) if found else "nothing is stated"


def parse_spec(text: str, ops: dict[str, Op]) -> Spec:
    """`op:sizes` or `op:sizes:dtype`. Raises BenchError."""
    op, _, rest = text.partition(":")
    sizes, _, dtype = rest.partition(":")
    if op not in ops:
        raise BenchError(f"{text!r} names no operation; there are {', '.join(ops)}")
    names = ops[op].names
    numbers = sizes.split(",")
    if len(numbers) != len(names) or not all(number.isdecimal() and int(number) for number in numbers):
        raise BenchError(f"{text!r} should be {op}:{','.join(names)}, each above 0, and :dtype if you like")
    if dtype and dtype not in DTYPES:
        raise BenchError(f"{text!r} should end with one of {', '.join(DTYPES)}")
    return Spec(op, tuple(map(int, numbers)), dtype or "bfloat16")


def rms_ratio(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference, over that of what is wanted; NaN where either has one."""
    wide = wanted.double()
    return float((found.double() - wide).norm() / wide.norm())


def unlike(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of entries that differ."""
    return float((found != wanted).double().mean())


def levels(rows: int, first: int, most: int = 32) -> list[int]:
    """Positions of a tree's nodes: `rows` of them on at most `most` levels, as even as can be."""
    return [first + row * min(rows, most) // rows for row in range(rows)]


def scattered(rows: int, start: int, end: int) -> list[int]:
    """`rows` ascending rows of a tree that lies at [start, end), spread over all of it."""
    if end - start < rows:
        raise BenchError(f"a path of {rows} rows does not fit in a tree of {end - start}")
    return [start + (row + 1) * (end - start) // rows - 1 for row in range(rows)]


def only(specs: Sequence[Spec], ops: Sequence[str] | None) -> list[Spec]:
    """The specs of some operations, or all."""
    return [spec for spec in specs if ops is None or spec.op in ops]
