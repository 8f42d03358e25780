"""Splitting of an answer into reasoning and text."""

import re
from dataclasses import dataclass
from typing import Literal

_NAMES = "think|thinking|reasoning"
# A reasoning block begins at the start of a line. Elsewhere a tag is part of a sentence about tags.
_OPEN = re.compile(rf"^[ \t]*<({_NAMES})>", re.MULTILINE)
_CLOSE = re.compile(rf"</(?:{_NAMES})>")
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an answer without the surrounding tags. closed: whether a reasoning block is complete."""

    kind: Literal["thinking", "text"]
    text: str
    closed: bool = True


def split_reasoning(text: str, opened: str = "") -> list[Part]:
    """Split an answer into its non-empty parts, in order.

    A closing tag without an opening one makes everything before it reasoning. Tags in code are ignored.

    opened: beginning of the answer by the chat template, possibly an opening reasoning tag.
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
        # A closing tag ends reasoning even inside code, because code in reasoning is often left unclosed.
        end = re.compile(f"</{begin[1]}>").search(whole, begin.end())
        thought = whole[begin.end() : end.start() if end else None]
        parts.append(Part("thinking", thought.strip(), closed=end is not None))
        at = end.end() if end else len(whole)
    parts.append(Part("text", whole[at:].lstrip("\n") if parts else whole[at:]))
    return [part for part in parts if part.text.strip() or not part.closed]


def without_reasoning(text: str, opened: str = "") -> str:
    """Return the text without reasoning, or the whole text if it is all reasoning."""
    answer = "\n\n".join(part.text.strip() for part in split_reasoning(text, opened) if part.kind == "text")
    return answer or text
