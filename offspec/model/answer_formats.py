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

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

    from offspec.model.tokenizer import TextCodec

PartsMaker = Callable[[str, Sequence[Mapping[str, Any]]], Parts]


class MarkedFormat:
    """See `AnswerFormat`.

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
        """See `AnswerFormat`."""
        from transformers.utils.chat_parsing import ResponseParser

        begun = self.begun(prompt)
        return ResponseParser(self._template, prefix=begun, tools=[dict(tool) for tool in tools])

    def begun(self, prompt: str) -> str:
        """See `AnswerFormat`."""
        return self._template.truncate_past_last_anchor(prompt) if prompt else ""

    def kind(self, field: str) -> Kind:
        """See `AnswerFormat`."""
        return _kind(field)

    def opening(self, field: str, text: str, at: int) -> tuple[int, int]:
        """See `AnswerFormat`."""
        pattern = self._template.fields[field].open_re
        found = pattern.search(text, at) if pattern else None
        return (found.start(), found.end()) if found else (at, at)

    def closing(self, field: str, text: str, at: int) -> int:
        """See `AnswerFormat`."""
        pattern = self._template.fields[field].close_re
        found = pattern.search(text, at) if pattern else None
        return found.end() if found else at


def find(codec: "TextCodec", calls: bool) -> PartsMaker | None:
    """A maker of parsers for a model's answers, with calls of tools or without; None if no mark is known.

    It is called with the prompt, special tokens included, and with the tools.
    """
    special = {i: codec.spell([i]) for i in codec.hidden_ids - codec.eos_ids}
    own = getattr(codec.tokenizer, "response_template", None)
    if own and complaint(codec) is None:
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
    own = getattr(codec.tokenizer, "response_template", None)
    if own and complaint(codec) is None:
        return frozenset(map(_kind, own["fields"]))
    family, thought = family_of(codec.answer_marks), thought_marks(codec.answer_marks)
    found: dict[Kind, bool] = {
        "call": family is not None,
        "thought": thought is not None or (family is not None and family.messages),
    }
    return frozenset(kind for kind, has in found.items() if has)


def complaint(codec: "TextCodec") -> str | None:
    """Why the tokenizer's own response template is not used; None where it is, and where there is none."""
    if not (own := getattr(codec.tokenizer, "response_template", None)):
        return None
    try:
        for calls in (True, False):
            MarkedFormat(_only(own, calls), {}).parser("", ())
    except Exception as error:  # whatever it is that somebody wrote there
        reason = " ".join(str(error).split())[:200]
        return (
            f"the response_template in {codec.folder / 'tokenizer_config.json'} cannot be used: {reason}; "
            "calls and thoughts are found as in other models of its chat template"
        )
    return None


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
