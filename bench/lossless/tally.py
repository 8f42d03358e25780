"""What was asked and answered, kept in a file as it comes, and compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
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
        text = self._file.read_text("utf-8")
        first, *lines = text.splitlines()
        if json.loads(first) != json.loads(json.dumps(settings)):
            raise BenchError(f"{self._file} was made with other settings: {first}; leave out --resume")
        if not text.endswith("\n"):  # a run was ended in the middle of a line
            lines.pop()
            self._file.write_text("".join(f"{line}\n" for line in (first, *lines)), "utf-8")
        for line in lines:
            entry = json.loads(line)
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
        same = found["ends"][turn] == reference["ends"][turn]
        at = _parting(said, expected, same)
        tokens += len(expected) if at is None else at + 1
        if at is not None:
            ids = (seen[at] if at < len(seen) else None for seen in (said, expected))
            mismatches.append(Mismatch(model, case.key, turn, at, *ids))
    return Compared(model, case, tokens, tuple(mismatches))


def _parting(said: Sequence[int], expected: Sequence[int], same_end: bool) -> int | None:
    """Index of the first token that differs, None where none does."""
    for at, (token, other) in enumerate(zip(said, expected, strict=False)):
        if token != other:
            return at
    return None if len(said) == len(expected) and same_end else min(len(said), len(expected))


def counts(compared: Iterable[Compared]) -> dict[str, int]:
    """Cases, tokens compared, cases with a mismatch, and mismatches."""
    group = list(compared)
    return {
        "cases": len(group),
        "tokens": sum(one.tokens for one in group),
        "cases_with_mismatch": sum(bool(one.mismatches) for one in group),
        "mismatches": sum(len(one.mismatches) for one in group),
    }


def by_setting(compared: Sequence[Compared]) -> dict[str, dict[str, int]]:
    """The same counts for each value of each setting."""
    values: dict[str, list[Compared]] = {}
    for one in compared:
        case = one.case
        named = {"T": f"{case.question.temperature:g}", **asdict(case), "question": None}
        for name, value in named.items():
            if value is not None:
                values.setdefault(f"{name} {value}", []).append(one)
    return {value: counts(group) for value, group in sorted(values.items())}
