"""Prompts, machine description, and printing and storing of results."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib.cgroup import BenchError
from offspec_planners.measure import wait_policy

PROMPTS = Path(__file__).parents[1] / "prompts"
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the set; `kind` is chat, code, story, facts, …"""

    id: str
    kind: str
    prompt: str


def read_prompts(count: int | None = None, folder: Path = PROMPTS) -> list[Prompt]:
    """Return the prompts, one of each kind in turn, so that the first `count` are evenly mixed.

    Raises BenchError for an invalid line, and if there are fewer than `count` prompts.
    """
    kinds: list[list[Prompt]] = []
    for file in sorted(folder.glob("*.jsonl")):
        lines = file.read_text("utf-8").splitlines()
        kinds.append([_parse(line, file.name) for line in lines if line.strip()])
    longest = max(map(len, kinds), default=0)
    mixed = [kind[turn] for turn in range(longest) for kind in kinds if turn < len(kind)]
    if not mixed or (count is not None and not 1 <= count <= len(mixed)):
        raise BenchError(f"{count} prompts were requested, but there are {len(mixed)}")
    return mixed[:count]


def _parse(line: str, file: str) -> Prompt:
    try:
        return Prompt(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise BenchError(f"{file} has a line without id, kind and prompt: {error}") from error


def model_name(model: str) -> str:
    """Return a model's name in results: a hub id unchanged, a path without its folders."""
    return Path(model).name if Path(model).exists() else model


def as_recorded(value: Any) -> Any:
    """Return a setting without the folders of paths."""
    if isinstance(value, list):
        return [as_recorded(one) for one in value]
    return model_name(value) if isinstance(value, str) else value


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return the machine and versions that figures depend on, without anything that identifies the owner."""
    return {
        "device": device,
        "cpu": _field(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": int(_field(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0) * 1024,
        "threads_wait": wait_policy() or "by default",
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "transformers", "bitsandbytes")},
    }


def _field(file: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, file.read_text())
    except OSError:
        return ""
    return found[1].strip() if found else ""


def version_of(name: str) -> str | None:
    """Return the version of an installed package."""
    # Read from the metadata: importing torch would keep its pages in the cache that a bench empties.
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_line(module: str, argv: Sequence[str]) -> str:
    """Return the command in repeatable form, with folders removed from paths."""
    shown = [Path(word).name if os.path.isabs(word) or Path(word).exists() else word for word in argv]
    return shlex.join(["python", "-m", module, *shown])


class Report:
    """Prints a bench's figures: the ceiling first, then the result and its ratio to the ceiling, JSON last.

    Figures go to stdout, progress to stderr, the whole record to a file. exit_code: 1 after a missed target.
    """

    def __init__(self, name: str = "", command: str = "", out: Path | None = None) -> None:
        self.name, self.command, self._out = name, command, out
        self.exit_code = 0
        self.out = Console(width=110 if not sys.stdout.isatty() else None, highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def ceiling(self, text: str) -> None:
        self.out.print(f"ceiling  {text}", markup=False, soft_wrap=True)

    def reached(self, text: str, ratio: float | None = None) -> None:
        share = "" if ratio is None else f"   ratio {ratio:.2f}"
        self.out.print(f"reached  {text}{share}", markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self.out.print(f"note     {text}", markup=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        self.err.print(text, markup=False, soft_wrap=True, style="dim")

    def table(self, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table of figures; see `grid`."""
        view = grid(title, *heads)
        for row in rows:
            view.add_row(*row)
        self.out.print(view)

    def missed(self, text: str) -> None:
        """Print a missed target and set the exit code to 1."""
        self.note(text)
        self.exit_code = 1

    def head(self, args: argparse.Namespace, *settings: str) -> dict[str, Any]:
        """Return the head of a record: the bench's name and these settings, without the folders of paths."""
        return {"bench": self.name, **{name: as_recorded(getattr(args, name)) for name in settings}}

    def file(self, variant: str = "") -> Path:
        """Return the path of the record."""
        return self._out or RESULTS / f"{self.name}{variant}.json"

    def write(self, record: dict[str, Any], variant: str = "") -> None:
        """Write a record to bench/results/<name><variant>.json, or to the path of --json."""
        place = self.file(variant)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    def record(
        self, summary: dict[str, Any], *, device: str = "cpu", variant: str = "", **details: Any
    ) -> None:
        """Write a summary with the command, the machine, and the details it was computed from."""
        about = {"command": self.command, "environment": environment(device)}
        self.write({**summary, **about, **details}, variant)


def grid(title: str, *heads: str) -> Table:
    """Return a table of figures: the first column is left-aligned, all others are right-aligned."""
    view = Table(title=title)
    view.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        view.add_column(head, justify="right")
    return view


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if whole is 0."""
    return part / whole if whole else 0.0
