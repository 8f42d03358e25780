"""Answer formats: the marks of reasoning and tool calls in a model's answers.

The tokenizer's response template defines them if it has one. Otherwise the chat template identifies a known
format.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offspec.chat.answer_parser import AnswerParser
from offspec.chat.chat_format_parser import ChatFormatParser
from offspec.chat.chat_formats import chat_format_of, reasoning_marks
from offspec.chat.prompt_reuse import OPENED
from offspec.chat.response_template_parser import Kind, ResponseTemplateParser
from offspec.checkpoint.ranges import one_line

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

    from offspec.model.tokenizer import TextCodec

PartsMaker = Callable[[str, Sequence[Mapping[str, Any]]], AnswerParser]


class ResponseTemplateFormat:
    """`AnswerFormat` defined by a transformers response template.

    Args:
        spec: Response template of a tokenizer.
        special: Special tokens that may occur within an answer, by id.
    """

    def __init__(self, spec: Mapping[str, Any], special: Mapping[int, str]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template: ResponseTemplate = load_response_template(dict(spec))
        marks = [*_marks(self._template)]
        self.shown = frozenset(i for i, token in special.items() if any(token in mark for mark in marks))

    def parser(self, prompt: str, tools: Collection[Mapping[str, Any]]) -> "ResponseParser":
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=self.answer_prefix(prompt), tools=[*map(dict, tools)])

    def answer_prefix(self, prompt: str) -> str:
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


def find_parts_factory(codec: "TextCodec", calls: bool) -> PartsMaker | None:
    """Return a factory of parsers for a model's answers, or None if the model's marks are unknown.

    The factory takes the prompt, including special tokens, and the tools.

    Args:
        codec: Tokenizer of the model.
        calls: Whether parsers recognize tool calls.
    """
    special = {i: codec.decode_with_special([i]) for i in codec.special_ids - codec.eos_ids}
    if own := _own_template(codec):
        format = ResponseTemplateFormat(_only(own, calls), special)
        return lambda prompt, tools: ResponseTemplateParser(format, prompt, tools)
    template = codec.answer_marks
    thought, family = reasoning_marks(template), chat_format_of(template)
    if family is not None and not calls and not family.messages:
        family = None
    if family is None and thought is None:
        return None
    marks = [*(thought or ()), *((*family.readers, *family.tokens) if family else ())]
    shown = frozenset(i for i, token in special.items() if any(token in mark for mark in marks))

    def parts(prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        thinking = OPENED.search(prompt) is not None
        return ChatFormatParser(family, thought, thinking=thinking, tools=tools, shown=shown)

    return parts


def kinds(codec: "TextCodec") -> frozenset[Kind]:
    """Return the kinds of parts recognized in a model's answers."""
    if own := _own_template(codec):
        return frozenset(map(_kind, own["fields"]))
    family, thought = chat_format_of(codec.answer_marks), reasoning_marks(codec.answer_marks)
    calls: set[Kind] = {"call"} if family is not None else set()
    thoughts: set[Kind] = {"thought"} if thought is not None or (family and family.messages) else set()
    return frozenset(calls | thoughts)


def template_error(codec: "TextCodec") -> str | None:
    """Return why the tokenizer's response template cannot be used; None if it can or does not exist."""
    if not (own := getattr(codec.tokenizer, "response_template", None)):
        return None
    try:
        for calls in (True, False):
            ResponseTemplateFormat(_only(own, calls), {}).parser("", ())
    except Exception as error:  # a malformed template may raise anything
        file = codec.folder / "tokenizer_config.json"
        return (
            f"the response_template in {file} cannot be used: {one_line(error)}; "
            "tool calls and reasoning are parsed by the model's chat template instead"
        )
    return None


def _own_template(codec: "TextCodec") -> Mapping[str, Any] | None:
    """Return the response template of a tokenizer, or None if it has no usable one."""
    own: Mapping[str, Any] | None = getattr(codec.tokenizer, "response_template", None)
    return own if own and template_error(codec) is None else None


def _only(spec: Mapping[str, Any], calls: bool) -> dict[str, Any]:
    """Return a response template with optional fields, without tool-call fields unless `calls`."""
    fields = {name: {**field, "optional": True} for name, field in spec["fields"].items()}
    kept = {name: field for name, field in fields.items() if calls or _kind(name) != "call"}
    return {**spec, "fields": kept}


def _kind(field: str) -> Kind:
    if field.startswith("tool_call"):
        return "call"
    return "thought" if any(word in field for word in ("think", "thought", "reason")) else "text"


def _marks(template: "ResponseTemplate") -> Iterator[str]:
    """Yield the literal text of a template's marks."""
    for field in template.fields.values():
        for literals, pattern in (
            (field.open_literals, field.open_re),
            (field.close_literals, field.close_re),
        ):
            yield from literals or ()
            if pattern is not None and not literals:
                yield pattern.pattern.replace("\\", "")
