"""A bench as a program: its options, how it runs, and how it ends."""

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
    "model": {"default": "demo", "help": "the small model, of which wide ones are made"},
    "factor": {"type": int, "default": 4, "help": "by which it is widened"},
    "target": {"type": Path, "help": "folder of the wide model (default: in the user's cache)"},
    "prompts": {"type": int, "help": "how many prompts, mixed by kind; all where no number is given"},
    "tokens": {"type": int, "default": 64, "help": "most new tokens of an answer"},
    "off_tokens": {"type": int, "default": 8, "help": "most new tokens without speculation"},
    "budget": {"type": int, "default": 256, "help": "nodes of a tree"},
    "width": {"type": int, "default": 32, "help": "nodes that a draft step expands"},
    "context": {"type": int, "help": "tokens of prompt and answer; what fits where no number is given"},
    "temperatures": {"type": float, "nargs": "+", "default": [0.0, 1.0]},
    "draft_bits": {"type": int, "choices": (2, 3, 4, 16), "help": "of the draft's weights"},
    "dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16"},
    "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "seed": {"type": int, "default": 1, "help": "of the first prompt; the others count on"},
    "memory": {"help": "memory limit, like 1.5GB, also of a cgroup; what is free where none is given"},
    "engine_memory": {"help": "the engine's memory limit (default: --memory)"},
    "raw_bytes": {"default": "2GB", "help": "of one reading of the model's files, for the raw rate"},
    "raw_threads": {"type": int, "help": "of a reading (default: the best of several shapes)"},
    "keep_caches": {"action": "store_true", "help": "do not drop the page cache (needs no root)"},
    "no_cgroup": {"action": "store_true", "help": "do not limit the memory (needs no root)"},
}


def shared(p: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add options that several benches have, some of them with defaults of one's own."""
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
    """The `main` of a bench: it parses, measures, and ends with one line of JSON.

    name: of its record. module: below `bench`, where that is not the name. options: adds what only this bench
    has. measure: prints and writes the figures, and returns the last line's object.
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
        """The exit code: 1 where an aim was missed, that of the error where one ended it."""
        words = sys.argv[1:] if argv is None else argv
        args = self.parser().parse_args(words)
        report = Report(self.name, command_line(self._path, words), args.json)
        return printed(lambda: json.dumps(self.measure(args, report)), lambda: report.exit_code)

    @property
    def _path(self) -> str:
        return f"bench.{self.module or self.name}"


def printed(work: Callable[[], object], exit_code: Callable[[], int] = lambda: 0) -> int:
    """Print what a program's work gives, or its error in one line; the exit code."""
    try:
        print(work(), flush=True)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return exit_code()


def printed_job(work: Callable[[dict[str, Any]], object]) -> int:
    """`printed` of what the job comes to that the command line has in JSON, in JSON; see `measured_job`."""
    return printed(lambda: json.dumps(work(json.loads(sys.argv[1]))))
