"""A text file that goes with a question, as a block with its name."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCES = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file, its name as it is shown, and its text. tokens: of the text."""

    file: Path
    name: str
    text: str
    tokens: int

    @property
    def block(self) -> str:
        """In a question. No line of the text closes the block."""
        longest = max((len(fence) for fence in _FENCES.findall(self.text)), default=2)
        fence = "`" * (longest + 1)
        return f"{self.name}:\n\n{fence}\n{self.text}\n{fence}"
