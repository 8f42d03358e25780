"""A bench as a program: its options, its run, and its exit code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.report import Report, command_line
from offspec.core.errors import OffspecError

MODEL: dict[str, Any] = {"nargs": "?", "default": "demo", "help": "folder, hub id, .gguf or demo (default)"}
_SHARED: dict[str, dict[str, Any]] = {
    "model": {"default": "demo", "help": "small model, from which wide ones are made"},
    "factor": {"type": int, "default": 4, "help": "widening factor"},
    "target": {"type": Path, "help": "folder of the wide model (default: in the user's cache)"},
    "prompts": {"type": int, "help": "number of prompts, mixed by kind (default: all)"},
    "tokens": {"type": int, "default": 64, "help": "maximum new tokens per answer"},
    "off_tokens": {"type": int, "default": 8, "help": "maximum new tokens without speculation"},
    "budget": {"type": int, "default": 256, "help": "tree size in nodes"},
    "width": {"type": int, "default": 32, "help": "nodes expanded per draft step"},
    "context": {"type": int, "help": "tokens of prompt and answer (default: what fits)"},
    "temperatures": {"type": float, "nargs": "+", "default": [0.0, 1.0]},
    "draft_bits": {"type": int, "choices": (2, 3, 4, 16), "help": "bits of the draft's weights"},
    "dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16"},
    "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "seed": {"type": int, "default": 1, "help": "seed of the first prompt, increased by 1 per prompt"},
    "memory": {"help": "memory limit, like 1.5GB, of the engine and the cgroup (default: free memory)"},
    "engine_memory": {"help": "the engine's memory limit (default: --memory)"},
    "raw_bytes": {"default": "2GB", "help": "bytes read per measurement of the raw disk rate"},
    "raw_threads": {"type": int, "help": "threads of a measurement (default: the best of several shapes)"},
    "keep_caches": {"action": "store_true", "help": "do not drop the page cache (no root required)"},
    "no_cgroup": {"action": "store_true", "help": "do not limit the memory (no root required)"},
}


def shared(p: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add options that several benches share; `defaults` replaces some of their defaults."""
    for name in (*names, *defaults):
        settings = dict(_SHARED[name])
        default = settings["default"] = defaults.get(name, settings.get("default"))
        if default is None or "action" in settings:
            del settings["default"]
        else:
            words = " ".join(map(str, default)) if isinstance(default, list) else default
            settings["help"] = f"{settings.get('help', '')} (default {words})".strip()
        p.add_argument(f"--{name.replace('_', '-')}", **settings)


@dataclass(frozen=True, slots=True)
class Command:
    """The `main` of a bench: parses options, measures, and ends with one line of JSON.

    Args:
        name: Name of its record.
        description: Text for --help.
        options: Adds the options that only this bench has.
        measure: Prints and writes the figures; returns the object of the last line.
        module: Module below `bench`, if it differs from `name`.
    """

    name: str
    description: str
    options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Report], dict[str, Any]]
    module: str = ""

    def parser(self) -> argparse.ArgumentParser:
        p = argparse.ArgumentParser(prog=f"python -m {self._path}", description=self.description)
        self.options(p)
        record = f"result file (default bench/results/{self.name}.json)"
        p.add_argument("--json", type=Path, metavar="OUT", help=record)
        return p

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the bench; return the exit code: 1 after a missed target, or the code of an error."""
        words = sys.argv[1:] if argv is None else argv
        args = self.parser().parse_args(words)
        report = Report(self.name, command_line(self._path, words), args.json)
        return printed(lambda: json.dumps(self.measure(args, report)), lambda: report.exit_code)

    @property
    def _path(self) -> str:
        return f"bench.{self.module or self.name}"


def printed(work: Callable[[], object], exit_code: Callable[[], int] = lambda: 0) -> int:
    """Print the result of a program's work, or its error in one line; return the exit code."""
    try:
        print(work(), flush=True)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return exit_code()


def printed_job(work: Callable[[dict[str, Any]], object]) -> int:
    """Print the result of `work` for the job on the command line, both as JSON; see `measured_job`."""
    return printed(lambda: json.dumps(work(json.loads(sys.argv[1]))))
