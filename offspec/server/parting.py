"""Text of a choice, as the engine makes it, becomes what was said, what was thought, and calls of tools."""

import secrets
from collections.abc import Iterator, Sequence

from offspec.chat.answer_parts import Call, OneCall, Part, Parts, PlainText, Text, Thinking
from offspec.core.events import Result
from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import Called, EndReason, Said, Thought, TokenChoice
from offspec.server.served_engine import ServedEngine


class Parting:
    """Takes one choice apart.

    one_call: what comes behind the first call is left out. shown: see `Parts`. called: how many calls there
    were. reasoning_tokens: of what was thought, marks included; where a pass brings thought and text, by
    their lengths.
    """

    def __init__(self, choice: int, parts: Parts, one_call: bool = False) -> None:
        self.choice, self._parts, self._one_call = choice, parts, one_call
        self.shown = parts.shown
        self.called = self.reasoning_tokens = 0

    @property
    def complete(self) -> bool:
        """There was the one call, and nothing more is taken."""
        return self._one_call and self.called > 0

    def feed(
        self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenChoice, ...]
    ) -> Iterator[Said | Thought | Called]:
        """The events of a piece of text, whose tokens come with the first text that is said."""
        parts = self._parts.feed(text)
        thought = sum(len(part.text) for part in parts if isinstance(part, Thinking))
        if thought:
            every = thought + sum(len(part.text) for part in parts if isinstance(part, Text))
            self.reasoning_tokens += round(len(token_ids) * thought / every)
        if logprobs and not any(isinstance(part, Text) for part in parts):
            parts = [Text(""), *parts]
        for part in parts:
            if self.complete:
                return
            event = self._event(part)
            if isinstance(event, Said) and token_ids:
                event = Said(self.choice, event.text, token_ids, logprobs)
                token_ids = ()
            yield event

    def finish(self) -> Iterator[Said | Thought | Called]:
        """The events of what is left, now that no text will follow."""
        for part in self._parts.finish():
            if not self.complete:
                yield self._event(part)

    def _event(self, part: Part) -> Said | Thought | Called:
        match part:
            case Text(text=text):
                return Said(self.choice, text)
            case Thinking(text=text):
                return Thought(self.choice, text)
            case Call():
                self.called += 1
                # Nine letters and digits: the templates of Mistral take no other ids.
                id = secrets.token_hex(5)[:9]
                return Called(self.choice, self.called - 1, id, part.name, part.arguments)


def parts_of(engine: ServedEngine, answer: DeltaStream) -> Parts:
    """What takes the text of an answer apart. Raises OffspecError."""
    ask = answer.ask
    if ask.raw:
        return PlainText()
    if ask.one_call:
        return OneCall(engine.parts(answer.ids, ()))
    return engine.parts(answer.ids, ask.tools.callable)


def reason_of(result: Result, parting: Parting) -> EndReason:
    """Why a choice ended."""
    if result.finish_reason in ("length", "context") and not parting.complete:
        return "length"
    return "tool_calls" if parting.called else "stop"


def stop_of(engine: ServedEngine, result: Result, stops: Sequence[str]) -> str | None:
    """Which stop text has ended an answer, whose tokens still have it: the first to be complete."""
    text = engine.spell(result.token_ids)
    found = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[2] if found else None
