"""Which parts of an answer the model thought to itself before it spoke."""

import re
from dataclasses import dataclass
from typing import Literal

_NAMES = "think|thinking|reasoning"
# A block begins a line. Elsewhere a tag is part of a sentence about tags.
_OPEN = re.compile(rf"^[ \t]*<({_NAMES})>", re.MULTILINE)
_CLOSE = re.compile(rf"</(?:{_NAMES})>")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an answer, without the tags around it. closed: whether a thought has come to its end."""

    kind: Literal["thinking", "text"]
    text: str
    closed: bool = True


def split(text: str, opened: str = "") -> list[Part]:
    """The parts of an answer in their order; those with nothing in them are left out.

    opened: what the chat template began the answer with, which may be the tag that opens a thought. A tag
    that closes one which was not opened makes a thought of all that is before it. Tags in code are code.
    """
    whole = opened + text
    plain = _CODE.sub(lambda code: " " * len(code[0]), whole)
    parts: list[Part] = []
    at = 0
    if (orphan := _CLOSE.search(plain)) and not _OPEN.search(plain, 0, orphan.start()):
        parts.append(Part("thinking", whole[: orphan.start()].strip()))
        at = orphan.end()
    while begin := _OPEN.search(plain, at):
        parts.append(Part("text", whole[at : begin.start()].strip("\n")))
        # In a thought any tag closes it: its code is often left open.
        end = re.compile(f"</{begin[1]}>").search(whole, begin.end())
        thought = whole[begin.end() : end.start() if end else None]
        parts.append(Part("thinking", thought.strip(), closed=end is not None))
        at = end.end() if end else len(whole)
    parts.append(Part("text", whole[at:].lstrip("\n") if parts else whole[at:]))
    return [part for part in parts if part.text.strip() or not part.closed]


def without_thinking(text: str, opened: str = "") -> str:
    """What was said aloud, or all of it where nothing was."""
    spoken = "\n\n".join(part.text.strip() for part in split(text, opened) if part.kind == "text")
    return spoken or text
