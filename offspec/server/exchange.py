"""What every API asks and is told: a request and the events of its answer, in no API's own terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from offspec.core.config import SamplingParams
from offspec.core.events import PassProgress, PassStats, Prefill, TreeSeen
from offspec.server.tools import Tools

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request.

    Args:
        prompt: Chat messages ({"role", "content", "tool_calls", "tool_call_id"}, as chat templates take
            them), text, or token ids.
        raw: Text as it is, without the chat template.
        suffix: Text after the answer, which then lies between the prompt, a text, and it.
        echo: The prompt's text comes before that of the answer; with its log-probabilities, if `params` ask
            for them.
        params: How tokens are chosen, and when to stop.
        tools: Those that may be called.
        parallel_calls: Whether an answer may call several tools; else it ends with its first call.
        template: Variables of the chat template, such as enable_thinking.
        continues: Whether the answer continues a last message of the assistant, or follows it.
        one_call: The answer is an object with the name and the arguments of a call.
        silent: Only the prompt is computed; the answer has no text.
        choices: Answers, each with the next seed.
        trees: Tell what the engine does, and of each pass its tree (`EngineEvent`).
    """

    prompt: Prompt
    raw: bool = False
    suffix: str | None = None
    echo: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    tools: Tools = field(default_factory=Tools)
    parallel_calls: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = True
    one_call: bool = False
    silent: bool = False
    choices: int = 1
    trees: bool = False


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """A token with its log-probability, in nats; None for the first token of a prompt.

    utf8: its bytes, which may be no whole character.
    """

    text: str
    utf8: bytes
    logprob: float | None


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What the model says of a token of the answer. top: the likeliest ones there, best first."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """More visible text of a choice. logprobs: of each token, where they were asked for."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Thought:
    """More reasoning of a choice."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A whole call of a tool. index: of the call in its choice; arguments: a JSON object, as text."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice is complete. stop: the one of its stop texts that ended it."""

    choice: int
    reason: EndReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and passes of the whole answer: its last event. cached_tokens: of the prompt, read from a
    cache."""

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    reasoning_tokens: int
    passes: int


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """What the engine does meanwhile, for display: where an `Ask` wants `trees`."""

    event: Prefill | PassProgress | TreeSeen | PassStats


Delta = Said | Thought | Called | Ended | Usage | EngineEvent
