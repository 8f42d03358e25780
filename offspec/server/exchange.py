"""A request and the deltas of its answer, as all APIs share them."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add
from typing import Any, Literal

from offspec.core.config import SamplingParams
from offspec.core.events import PassProgress, PassStats, Prefill, TreeSeen
from offspec.core.model_info import ModelInfo
from offspec.server.faults import invalid, unsupported
from offspec.server.tools import Tools

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
EndReason = Literal["stop", "length", "tool_calls"]
# Arguments of transformers' function, with which a client could do other things than set a variable.
_NO_VARIABLES = {
    *("chat_template", "conversation", "tools", "documents", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}


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

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template, tools included. Raises Fault for names that are not variables."""
        if wrong := sorted(_NO_VARIABLES & self.template.keys()):
            raise unsupported(
                "chat_template_kwargs", f"{wrong[0]} is no variable of a chat template; leave it out"
            )
        tools = [] if self.tools.choice == "none" else [dict(tool) for tool in self.tools.functions]
        return {**self.template, "tools": tools} if tools else dict(self.template)

    def with_suffix(self, suffix: str, model: ModelInfo, field: str = "suffix") -> "Ask":
        """The request with text after the answer, and tokens that end the answer before it.

        Args:
            suffix: The text.
            model: The model that answers.
            field: Field of the body.

        Raises:
            Fault: The model's tokenizer has no marks for it, or the prompt is not text.
        """
        if (ends := model.infill_ends) is None:
            raise unsupported(field, "this model's tokenizer has no marks for it; leave it out")
        if not isinstance(self.prompt, str):
            raise invalid(field, "the prompt must be text")
        params = replace(self.params, stop_token_ids=(*self.params.stop_token_ids, *ends))
        return replace(self, raw=True, suffix=suffix, params=params)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token with its log-probability, in nats; None for the first token of a prompt.

    utf8: its bytes, which may be no whole character. top: the likeliest tokens there, best first.
    """

    text: str
    utf8: bytes
    logprob: float | None
    top: tuple["TokenChoice", ...] = ()


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
    """Tokens of the whole answer: its last event. cached_tokens: of the prompt, read from a cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*map(add, astuple(self), astuple(other)))


EngineEvent = Prefill | PassProgress | TreeSeen | PassStats  # for display: where an `Ask` wants `trees`
Delta = Said | Thought | Called | Ended | Usage | EngineEvent
