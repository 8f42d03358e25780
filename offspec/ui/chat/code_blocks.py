"""`/copy code`: one block of code of the answers."""

from typing import NamedTuple

from offspec.core.errors import RequestError
from offspec.ui.chat import versions
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.outcomes import Copy
from offspec.ui.chat.thinking import without_thinking
from offspec_planners.units import format_count


class CodeBlock(NamedTuple):
    """language: as the model named it, or ""."""

    language: str
    code: str


def copy_code(chat: ChatController, argument: str) -> Copy:
    """Return the last block of code of the conversation, or the one that many from the end.

    Raises RequestError if there are fewer.
    """
    back = versions.count(argument, "/copy code 2 copies the last block but one")
    answers = [m for m in chat.session.messages if m.role == "assistant"]
    blocks = [block for m in answers for block in code_blocks(without_thinking(m.content, m.opened))]
    if not blocks:
        raise RequestError("there is no block of code in the answers yet")
    if back > len(blocks):
        raise RequestError(
            f"there are only {len(blocks)} blocks of code; /copy code {len(blocks)} copies the first"
        )
    language, code = blocks[-back]
    lines = format_count(code.count("\n") + 1, "line")
    return Copy(code, f"block {len(blocks) - back + 1} of {len(blocks)}, {lines} of {language or 'code'}")


def code_blocks(markdown: str) -> list[CodeBlock]:
    """Blocks of code in their order, each without the end of its last line: pasted, it does not run yet."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").parse(markdown)
    found = (token for token in tokens if token.type in ("fence", "code_block") and token.content.strip())
    return [CodeBlock(token.info.strip().partition(" ")[0], token.content.rstrip("\n")) for token in found]
