"""A chat on an engine that follows a script, with a thread beside it that burns the processor.

    python -m bench.chat.scripted [--burn python] [--pass-seconds 0.2]

What the interface costs by itself, and what becomes of its keys when an engine is at work: one that computes
in Python and shares the interpreter (`python`), or one that computes outside it (`native`).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import threading

from bench.chat.drive import BURNS
from offspec.core.config import EngineConfig, SamplingParams
from offspec.ui import tui
from offspec.ui.chat.setup import Setup
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad, reading

LOAD_SECONDS = 3.0
_PARAGRAPH = (
    "## Part {0}\n\nLight of **short** waves is scattered more than light of long ones, and so it comes "
    "from every part of the sky. Some `names` in between, and a list:\n\n- the sun stands high\n- the air is "
    "clear\n\n```python\ndef blue(sky: float) -> float:\n    return sky ** -4\n```\n\n"
)


def text_of(words: int) -> str:
    """Markdown of at least so many words, with what answers have in them."""
    text = ""
    while len(text.split()) < words:
        text += _PARAGRAPH.format(text.count("##") + 1)
    return text


def burn(kind: str) -> None:
    """Keep a core busy for as long as the program runs."""
    block = bytes(1 << 24)
    while True:
        if kind == "python":
            sum(number * number for number in range(10_000))
        else:
            hashlib.sha256(block)


def main() -> int:
    parser = argparse.ArgumentParser(description="A chat on an engine that follows a script.")
    parser.add_argument("--burn", choices=BURNS, default="none")
    parser.add_argument("--pass-seconds", type=float, default=0.2)
    parser.add_argument("--words", type=int, default=200)
    args = parser.parse_args()
    if args.burn != "none":
        threading.Thread(target=burn, args=[args.burn], daemon=True).start()
    engine = ScriptedEngine([text_of(args.words)], delay=args.pass_seconds, layers=32)
    setup = Setup(EngineConfig(model="scripted"), SamplingParams())
    return tui.run(setup, ScriptedLoad(engine, told=reading(30), delay=LOAD_SECONDS))


if __name__ == "__main__":
    sys.exit(main())
