"""How models mark reasoning and calls of tools in their answers.

By the response template of a tokenizer, where it has one; else by the family, known by its chat template.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offspec.chat.answer_parts import Parts
from offspec.chat.families import family_of, thought_marks
from offspec.chat.family_parts import FamilyParts
from offspec.chat.marked_parts import Kind, MarkedParts
from offspec.chat.prompt_reuse import OPENED
from offspec.checkpoint.ranges import one_line

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

    from offspec.model.tokenizer import TextCodec

PartsMaker = Callable[[str, Sequence[Mapping[str, Any]]], Parts]


class MarkedFormat:
    """An `AnswerFormat` of transformers.

    Args:
        spec: The response template of a tokenizer.
        special: The special tokens that may come within an answer, by id.
    """

    def __init__(self, spec: Mapping[str, Any], special: Mapping[int, str]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template: ResponseTemplate = load_response_template(dict(spec))
        marks = [*_marks(self._template)]
        self.shown = frozenset(i for i, token in special.items() if any(token in mark for mark in marks))

    def parser(self, prompt: str, tools: Collection[Mapping[str, Any]]) -> "ResponseParser":
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=self.begun(prompt), tools=[*map(dict, tools)])

    def begun(self, prompt: str) -> str:
        return self._template.truncate_past_last_anchor(prompt) if prompt else ""

    def kind(self, field: str) -> Kind:
        return _kind(field)

    def opening(self, field: str, text: str, at: int) -> tuple[int, int]:
        pattern = self._template.fields[field].open_re
        found = pattern.search(text, at) if pattern else None
        return (found.start(), found.end()) if found else (at, at)

    def closing(self, field: str, text: str, at: int) -> int:
        pattern = self._template.fields[field].close_re
        found = pattern.search(text, at) if pattern else None
        return found.end() if found else at


def find(codec: "TextCodec", calls: bool) -> PartsMaker | None:
    """A maker of parsers for a model's answers, with calls of tools or without; None if no mark is known.

    It is called with the prompt, special tokens included, and with the tools.
    """
    special = {i: codec.spell([i]) for i in codec.hidden_ids - codec.eos_ids}
    if own := _own_template(codec):
        format = MarkedFormat(_only(own, calls), special)
        return lambda prompt, tools: MarkedParts(format, prompt, tools)
    template = codec.answer_marks
    thought, family = thought_marks(template), family_of(template)
    if family is not None and not calls and not family.messages:
        family = None
    if family is None and thought is None:
        return None
    marks = [*(thought or ()), *((*family.readers, *family.tokens) if family else ())]
    shown = frozenset(i for i, token in special.items() if any(token in mark for mark in marks))

    def parts(prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parts:
        thinking = OPENED.search(prompt) is not None
        return FamilyParts(family, thought, thinking=thinking, tools=tools, shown=shown)

    return parts


def kinds(codec: "TextCodec") -> frozenset[Kind]:
    """Return the kinds of parts that are recognized in answers of a model."""
    if own := _own_template(codec):
        return frozenset(map(_kind, own["fields"]))
    family, thought = family_of(codec.answer_marks), thought_marks(codec.answer_marks)
    calls: set[Kind] = {"call"} if family is not None else set()
    thoughts: set[Kind] = {"thought"} if thought is not None or (family and family.messages) else set()
    return frozenset(calls | thoughts)


def complaint(codec: "TextCodec") -> str | None:
    """Why the tokenizer's own response template is not used; None where it is, and where there is none."""
    if not (own := getattr(codec.tokenizer, "response_template", None)):
        return None
    try:
        for calls in (True, False):
            MarkedFormat(_only(own, calls), {}).parser("", ())
    except Exception as error:  # whatever it is that somebody wrote there
        file = codec.folder / "tokenizer_config.json"
        return (
            f"the response_template in {file} cannot be used: {one_line(error)}; "
            "calls and thoughts are found as in other models of its chat template"
        )
    return None


def _own_template(codec: "TextCodec") -> Mapping[str, Any] | None:
    """The response template of a tokenizer; None if it has none that can be used."""
    own: Mapping[str, Any] | None = getattr(codec.tokenizer, "response_template", None)
    return own if own and complaint(codec) is None else None


def _only(spec: Mapping[str, Any], calls: bool) -> dict[str, Any]:
    """A response template without its calls, unless there are to be any."""
    fields = {name: {**field, "optional": True} for name, field in spec["fields"].items()}
    kept = {name: field for name, field in fields.items() if calls or _kind(name) != "call"}
    return {**spec, "fields": kept}


def _kind(field: str) -> Kind:
    if field.startswith("tool_call"):
        return "call"
    return "thought" if any(word in field for word in ("think", "thought", "reason")) else "text"


def _marks(template: "ResponseTemplate") -> Iterator[str]:
    """Text that the marks of a template are made of."""
    for field in template.fields.values():
        for literals, pattern in (
            (field.open_literals, field.open_re),
            (field.close_literals, field.close_re),
        ):
            yield from literals or ()
            if pattern is not None and not literals:
                yield pattern.pattern.replace("\\", "")
