"""Cases to plan for: targets, and their memory limits.

    python -m bench.plan.cases TARGET

TARGET is a `Target` in JSON. Prints the minimum memory, in bytes, that `offspec plan` accepts for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from bench.lib.process import child
from bench.lib.widen import default_folder
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, OffspecError
from offspec.core.values import parse_bytes

LEAST = "least"
CASES = (
    *("x1:least:0", "x1:0.75GB:0", "x1:1GB:0", "x1:2GB:0", "x1:1GB:1"),
    *("x2:least:0", "x2:1.5GB:0", "x2:3GB:0", "x2:1.5GB:1"),
    *("x4:least:0", "x4:1.5GB:0", "x4:3GB:0", "x4:6GB:0", "x4:1.5GB:1"),
)
WIDE_CONTEXT = 1024  # of widened models; the small model has the context that fits
_STEP = 10_000_000  # bytes to which the minimum memory is rounded up: memory of libraries varies by less


@dataclass(frozen=True, slots=True)
class Case:
    """A plan to make and to validate. memory: as a user writes it, or `least`."""

    factor: int
    memory: str
    temperature: float

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse "x4:1.5GB:0". Raises argparse.ArgumentTypeError."""
        try:
            factor, memory, temperature = text.split(":")
            if memory != LEAST:
                parse_bytes(memory)
            return cls(int(factor.removeprefix("x")), memory, float(temperature))
        except (ValueError, OffspecError) as error:
            raise argparse.ArgumentTypeError(
                f"invalid case {text!r}: write factor, memory and temperature, such as x4:1.5GB:0"
            ) from error

    def __str__(self) -> str:
        return f"x{self.factor}:{self.memory}:{self.temperature:g}"

    def memory_bytes(self, target: Target) -> int:
        """Return the bytes of memory; the minimum is determined in a separate process."""
        if self.memory != LEAST:
            return parse_bytes(self.memory)
        return int(child("bench.plan.cases", json.dumps(asdict(target))))


@dataclass(frozen=True, slots=True)
class Target:
    """A model and its draft: a self-draft, or a named draft in 4 bits."""

    model: str
    draft: str = "self"
    context: int | None = None

    @classmethod
    def widened(cls, model: str, factor: int) -> Target:
        """Return the model itself for factor 1, else its widened copy, drafted by the small one."""
        if factor == 1:
            return cls(model)
        child("bench.lib.widen", model, "--factor", str(factor))
        return cls(str(default_folder(model, factor)), model, WIDE_CONTEXT)

    def words(self, besides: Sequence[str] = ()) -> list[str]:
        """Return arguments of `offspec plan`. besides: further ones, which replace these."""
        words = [self.model, *besides]
        if "--draft" not in besides:
            words += ["--draft", self.draft]
        if self.draft != "self" and not {"--draft", "--draft-bits"} & set(besides):
            words += ["--draft-bits", "4"]
        return words if self.context is None else [*words, "--context", str(self.context)]


def least_memory(target: Target) -> int:
    """Return the minimum bytes that planning accepts, rounded up slightly."""
    from offspec.plan.initial_fit import initial_fit
    from offspec.plan.load import open_models

    config = EngineConfig(
        target.model,
        draft=target.draft,
        draft_bits=None if target.draft == "self" else 4,
        memory=1,
        device="cpu",
        context=target.context,
    )
    opened = open_models(config, lambda event: None)
    try:
        initial_fit(opened, None, None, lambda event: None)
    except CapacityError as error:
        return -(-error.needed // _STEP) * _STEP
    finally:
        opened.close()
    raise BenchError("one byte of memory was accepted")


if __name__ == "__main__":
    sys.exit(printed(lambda: least_memory(Target(**json.loads(sys.argv[1])))))
