"""Renew the output of `offspec plan` in docs/quickstart.md.

Each command is in a comment, and its output in the block below.

python docs/make_quickstart.py    takes some minutes; needs neither the models nor the machines
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("quickstart.md")
_SHOWN = re.compile(r"<!-- offspec (plan .*?) -->\n```text\n(?:(?!```).*\n)*```\n")
_TITLES = ("Placement of the layers", "Expected speed, and its bottleneck")


def shortened(page: str) -> str:
    """A plan's first lines, which layers are where, and what to expect."""
    first, *others = page.strip("\n").split("\n\n")
    parts = [first.splitlines(), *(part.splitlines() for part in others if part.startswith(_TITLES))]
    layers = next(part for part in parts if part[0] == _TITLES[0])
    del layers[1 + max(at for at, line in enumerate(layers) if re.search("[█▒░]", line)) :]
    return "\n\n".join("\n".join(part) for part in parts)


def plan(words: list[str]) -> str:
    """Output of `offspec`, 80 columns wide."""
    command = [sys.executable, "-m", "offspec", *words]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def renewed(page: str, plan: Callable[[list[str]], str] = plan) -> str:
    """The page with each block as its command prints it today."""

    def block(command: re.Match[str]) -> str:
        return f"<!-- offspec {command[1]} -->\n```text\n{shortened(plan(shlex.split(command[1])))}\n```\n"

    return _SHOWN.sub(block, page)


def main() -> None:
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
