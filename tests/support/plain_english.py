"""Check of English: `python -m tests.support.plain_english [FILE...]` lists passages to rewrite.

It finds common faults in docstrings, comments and strings of the program and in the docs. It helps writers;
it does not judge style. Exceptions for passages that are right as they are belong in plain_english.toml.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EXCEPTIONS = Path(__file__).with_suffix(".toml")
CODE = ("offspec", "kernels", "planners", "bench")
PAGES = ("README.md", "CONTRIBUTING.md", "bench/README.md", "docs/*.md")
_LONGEST = 40  # words of a sentence in the docs

_OPENING = re.compile(r"(What(?!-if)|Where|Which|Who|How|When|Of|That of|Those of|The same|As)\b(?! \d)")
_WORDS: Mapping[str, str] = {
    "told": "reports, warns, prints, or who passes what",
    "beside": "next to, in addition to, with",
    "behind": "after, following",
    "newcomer": "new request",
    "newcomers": "new requests",
    "nought": "zero",
    "substitute": "self-draft",
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)


class Passage(NamedTuple):
    """A piece of text: a docstring or a paragraph of one, a comment, a string, or a sentence."""

    file: str
    line: int
    kind: str
    text: str


class Finding(NamedTuple):
    """A passage to rewrite, and the reason."""

    passage: Passage
    rule: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.passage.file}:{self.passage.line}"
        return f"{place}: {self.rule}: {self.hint}\n    {self.passage.text[:160]}"


def check(passages: Iterable[Passage]) -> Iterator[Finding]:
    """Yield a finding for each rule that a passage breaks."""
    for passage in passages:
        plain = re.sub(r"`[^`]*`", "`…`", passage.text)
        if passage.kind == "docstring" and (found := _OPENING.match(plain)):
            yield Finding(passage, "opening", f"open with a noun or an imperative, not with {found[1]!r}")
        for word in {found.lower() for found in _WORD.findall(plain)}:
            yield Finding(passage, "word", f"{word!r}: {_WORDS[word]}")
        if passage.kind == "sentence" and (length := len(plain.split())) > _LONGEST:
            yield Finding(passage, "length", f"{length} words: split it")


def code_passages(file: Path) -> Iterator[Passage]:
    """Docstrings, strings of several words and comments of a Python file."""
    source, name = file.read_text(encoding="utf-8"), _name(file)
    documented = set[int]()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) and isinstance(first, ast.Expr):
                documented.add(id(first.value))
                yield from _paragraphs(name, first.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield Passage(name, node.lineno, "string", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(name, token.start[0], "comment", token.string.lstrip("#: "))


def page_passages(file: Path) -> Iterator[Passage]:
    """Sentences of a page in Markdown, and cells of its tables, without code."""
    fenced = False
    block, first = list[str](), 1
    for number, line in enumerate([*file.read_text(encoding="utf-8").splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        text = "" if fenced or fence else re.sub(r"^\s*(?:[-*>#]+|\d+\.)\s+", "", line)
        starts = not text.strip() or text != line or line.lstrip().startswith("|")
        if starts and block:
            yield from _sentences(_name(file), first, " ".join(block))
            block = []
        if text.strip():
            first = first if block else number
            block.append(text.strip())


def all_passages(files: Iterable[Path] = ()) -> Iterator[Passage]:
    """Passages of these files, by default of the program, the benchmarks and the docs."""
    for file in files or _files():
        yield from page_passages(file) if file.suffix == ".md" else code_passages(file)


def exceptions() -> list[tuple[str, str]]:
    """Passages that stay as they are: their file, and a part of their text."""
    entries = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))["exception"]
    return [(entry["file"], entry["text"]) for entry in entries]


def _files() -> Iterator[Path]:
    for folder in CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))
    for pattern in PAGES:
        yield from (page for page in sorted(ROOT.glob(pattern)) if page.name != "cli.md")


def _paragraphs(name: str, docstring: ast.Constant) -> Iterator[Passage]:
    """Paragraphs of the docstring, and each parameter under `Args:`; the first may not open as a fragment."""
    line, kind = docstring.lineno, "docstring"
    for part in re.split(r"(\n\s*\n|\n(?= *\w+: ))", str(docstring.value)):
        if text := " ".join(part.split()):
            yield Passage(name, line, kind, text)
            kind = "paragraph"
        line += part.count("\n")


def _sentences(name: str, line: int, text: str) -> Iterator[Passage]:
    cells = text.strip("|").split(" | ") if text.startswith("|") else [text]
    for cell in cells:
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*\[(\d])", cell.strip()):
            yield Passage(name, line, "sentence", sentence)


def _name(file: Path) -> str:
    return file.resolve().relative_to(ROOT).as_posix()


def findings(files: Iterable[Path] = ()) -> list[Finding]:
    """Findings in these files, without the exceptions."""
    allowed = exceptions()
    return [
        finding
        for finding in check(all_passages(files))
        if not any(file == finding.passage.file and text in finding.passage.text for file, text in allowed)
    ]


if __name__ == "__main__":
    found = findings([Path(name) for name in sys.argv[1:]])
    print(*found, f"{len(found)} passages", sep="\n")
    sys.exit(bool(found))
