"""What was asked and answered, kept in a file as it comes, and compared."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lossless.cases import Case


class State:
    """Answers by model and key, in a file of JSON lines that a later run goes on with.

    Args:
        file: Is made anew, unless `resume`.
        settings: All that answers depend on; those of a file to be resumed must be the same.
        resume: Keep what the file has.

    Raises:
        BenchError: There is nothing to resume, or it was asked in another way.
    """

    def __init__(self, file: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.found: dict[tuple[str, str], dict[str, Any]] = {}
        self._file = file
        if resume:
            self._read(settings)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings) + "\n", "utf-8")

    def _read(self, settings: dict[str, Any]) -> None:
        if not self._file.exists():
            raise BenchError(f"there is no {self._file} to go on with; leave out --resume")
        first, *lines = self._file.read_text("utf-8").splitlines(keepends=True)
        if json.loads(first) != json.loads(json.dumps(settings)):
            raise BenchError(f"{self._file} has other settings: {first.strip()}; leave out --resume")
        if lines and not lines[-1].endswith("\n"):  # a run was ended in the middle of a line
            lines.pop()
            self._file.write_text("".join((first, *lines)), "utf-8")
        for entry in map(json.loads, lines):
            self.found[entry["model"], entry["key"]] = entry

    def add(self, model: str, entry: dict[str, Any]) -> None:
        """Keep what was found of a model under `entry["key"]`."""
        entry = {"model": model, **entry}
        self.found[model, entry["key"]] = entry
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where an answer is another than its reference: turn 0 or 1, index of the token; None: it had ended."""

    model: str
    case: str
    turn: int
    index: int
    token: int | None
    reference: int | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A case beside its reference. tokens: of both answers, up to where they part, that token included."""

    model: str
    case: Case
    tokens: int
    mismatches: tuple[Mismatch, ...]


def compare(model: str, case: Case, found: dict[str, Any], reference: dict[str, Any]) -> Compared:
    """Both answers of a case, token by token, and where they ended."""
    tokens, mismatches = 0, list[Mismatch]()
    for turn in range(2):
        said, expected = found["answers"][turn], reference["answers"][turn]
        pairs = zip_longest(said, expected)
        at = next((at for at, (token, other) in enumerate(pairs) if token != other), None)
        if at is None and found["ends"][turn] != reference["ends"][turn]:
            at = len(said)
        tokens += len(expected) if at is None else at + 1
        if at is not None:
            ids = (seen[at] if at < len(seen) else None for seen in (said, expected))
            mismatches.append(Mismatch(model, case.key, turn, at, *ids))
    return Compared(model, case, tokens, tuple(mismatches))


def counts(group: Sequence[Compared]) -> dict[str, int]:
    """Cases, tokens compared, cases with a mismatch, and mismatches."""
    return {
        "cases": len(group),
        "tokens": sum(one.tokens for one in group),
        "cases_with_mismatch": sum(bool(one.mismatches) for one in group),
        "mismatches": sum(len(one.mismatches) for one in group),
    }


def by_setting(compared: Sequence[Compared]) -> dict[str, dict[str, int]]:
    """The same counts for each value of each setting."""
    values = defaultdict[str, list[Compared]](list)
    for one in compared:
        values[f"T {one.case.question.temperature:g}"].append(one)
        for name in ("budget", "memory", "chunk", "kept"):
            values[f"{name} {getattr(one.case, name)}"].append(one)
    return {value: counts(group) for value, group in sorted(values.items())}
