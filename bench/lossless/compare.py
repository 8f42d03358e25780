"""Storing answers in a file as they arrive, and comparing them."""

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


class AnswerStore:
    """Answers by model and key, in a file of JSON lines that a later run can resume.

    Args:
        file: The file, replaced unless `resume`.
        settings: All settings that answers depend on; a resumed file must have the same.
        resume: Keep the contents of the file.

    Raises:
        BenchError: There is nothing to resume, or its settings differ.
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
            raise BenchError(f"{self._file} does not exist: nothing to resume; leave out --resume")
        first, *lines = self._file.read_text("utf-8").splitlines(keepends=True)
        if json.loads(first) != json.loads(json.dumps(settings)):
            raise BenchError(f"{self._file} has other settings: {first.strip()}; leave out --resume")
        if lines and not lines[-1].endswith("\n"):  # a run was interrupted in the middle of a line
            lines.pop()
            self._file.write_text("".join((first, *lines)), "utf-8")
        for entry in map(json.loads, lines):
            self.found[entry["model"], entry["key"]] = entry

    def add(self, model: str, entry: dict[str, Any]) -> None:
        """Store a model's result under `entry["key"]`."""
        entry = {"model": model, **entry}
        self.found[model, entry["key"]] = entry
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Position where an answer differs from its reference: turn 0 or 1, token index; None: it had ended."""

    model: str
    case: str
    turn: int
    index: int
    token: int | None
    reference: int | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A case and its reference. tokens: of both answers, up to and including the first difference."""

    model: str
    case: Case
    tokens: int
    mismatches: tuple[Mismatch, ...]


def compare(model: str, case: Case, found: dict[str, Any], reference: dict[str, Any]) -> Compared:
    """Compare both answers of a case with the reference, by tokens and by length."""
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
    """Return the number of cases, of tokens compared, of cases with a mismatch, and of mismatches."""
    return {
        "cases": len(group),
        "tokens": sum(one.tokens for one in group),
        "cases_with_mismatch": sum(bool(one.mismatches) for one in group),
        "mismatches": sum(len(one.mismatches) for one in group),
    }


def by_setting(compared: Sequence[Compared]) -> dict[str, dict[str, int]]:
    """Return `counts` for each value of each setting."""
    values = defaultdict[str, list[Compared]](list)
    for one in compared:
        values[f"T {one.case.question.temperature:g}"].append(one)
        for name in ("budget", "memory", "chunk", "kept"):
            values[f"{name} {getattr(one.case, name)}"].append(one)
    return {value: counts(group) for value, group in sorted(values.items())}
