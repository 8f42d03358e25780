"""How models mark thoughts and calls of tools in their answers: response templates, as transformers has them.

Those of a tokenizer, where it has one; else that of the family, known by what its chat template writes.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from offspec.chat.answer_parts import Kind
from offspec.chat.prompt_reuse import OPENED
from offspec.model.response_templates import CALLS, THOUGHTS

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

    from offspec.model.tokenizer import TextCodec


class MarkedFormat:
    """See `AnswerFormat`.

    Args:
        spec: A response template.
        special: The special tokens that may come within an answer, by id.
        own: It is the tokenizer's, and finds the beginning of the answer in a prompt by itself.
    """

    def __init__(self, spec: Mapping[str, Any], special: Mapping[int, str], own: bool) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template: ResponseTemplate = load_response_template(dict(spec))
        self._own = own
        marks = [*_marks(self._template)]
        self.shown = frozenset(i for i, token in special.items() if any(token in mark for mark in marks))

    def parser(self, prompt: str, tools: Collection[Mapping[str, Any]]) -> "ResponseParser":
        """See `AnswerFormat`."""
        from transformers.utils.chat_parsing import ResponseParser

        begun = self.begun(prompt)
        return ResponseParser(self._template, prefix=begun, tools=[dict(tool) for tool in tools])

    def begun(self, prompt: str) -> str:
        """See `AnswerFormat`."""
        if self._own:
            return self._template.truncate_past_last_anchor(prompt) if prompt else ""
        opened = OPENED.search(prompt)
        return opened[0] if opened else ""

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


def find(codec: "TextCodec", calls: bool) -> MarkedFormat | None:
    """The format of a model's answers, with calls of tools or without; None where it marks nothing known."""
    special = {i: codec.spell([i]) for i in codec.hidden_ids - codec.eos_ids}
    own = getattr(codec.tokenizer, "response_template", None)
    if own and complaint(codec) is None:
        return MarkedFormat(_only(own, calls), special, True)
    spec = _known(str(codec.tokenizer.chat_template or ""), calls)
    return MarkedFormat(spec, special, False) if len(spec["fields"]) > 1 else None


def kinds(codec: "TextCodec") -> frozenset[Kind]:
    """Return the kinds of parts that are recognized in answers of a model."""
    own = getattr(codec.tokenizer, "response_template", None)
    if own and complaint(codec) is None:
        return frozenset(map(_kind, own["fields"]))
    return frozenset(map(_kind, _known(str(codec.tokenizer.chat_template or ""), calls=True)["fields"]))


def complaint(codec: "TextCodec") -> str | None:
    """Why the tokenizer's own response template is not used; None where it is, and where there is none."""
    if not (own := getattr(codec.tokenizer, "response_template", None)):
        return None
    try:
        for calls in (True, False):
            MarkedFormat(_only(own, calls), {}, True).parser("", ())
    except Exception as error:  # whatever it is that somebody wrote there
        reason = " ".join(str(error).split())[:200]
        return (
            f"the response_template in {codec.folder / 'tokenizer_config.json'} cannot be used: {reason}; "
            "calls and thoughts are found as in other models of its chat template"
        )
    return None


def _known(template: str, calls: bool) -> dict[str, Any]:
    """A response template by what a chat template writes."""
    fields: dict[str, Any] = {"content": {}}
    if thought := next((field for tag, field in THOUGHTS.items() if tag in template), None):
        fields["thinking"] = thought
    fields |= next((family for mark, family in CALLS.items() if mark in template), {})
    return _only({"start_anchor_pattern": r"\A", "fields": fields}, calls)


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
