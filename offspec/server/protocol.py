"""A request and the deltas of its answer, as all APIs share them."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add
from typing import Any, Literal

from offspec.core.config import SamplingParams
from offspec.core.events import PassProgress, PassStats, Prefill, TreeSeen
from offspec.core.model_info import ModelInfo
from offspec.server.api_errors import invalid, unsupported
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
class GenerateRequest:
    """Request for an answer, independent of the API.

    Args:
        prompt: Chat messages ({"role", "content", "tool_calls", "tool_call_id"}, as in chat templates), text,
            or token ids.
        raw: Whether text is used without the chat template.
        suffix: Text that follows the answer, for infill. None: no infill.
        echo: Whether the answer begins with the text of the prompt, and with its log-probabilities if
            `params` request them.
        params: Sampling parameters.
        tools: Tools that the model may call.
        parallel_calls: Whether an answer may call several tools. If not, it ends with its first call.
        chat_template_kwargs: Variables of the chat template, such as enable_thinking.
        continue_final_message: Whether the answer continues a final message of the assistant.
        one_call: Whether the answer is an object with the name and the arguments of a call.
        prompt_only: Whether only the prompt is computed; the answer has no text then.
        choices: Number of answers, each with the next seed.
        trees: Whether to send the events of the engine and the tree of each pass (`EngineEvent`).
    """

    prompt: Prompt
    raw: bool = False
    suffix: str | None = None
    echo: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    tools: Tools = field(default_factory=Tools)
    parallel_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = True
    one_call: bool = False
    prompt_only: bool = False
    choices: int = 1
    trees: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template, tools included. Raises ApiError for invalid names."""
        if wrong := sorted(_NO_VARIABLES & self.chat_template_kwargs.keys()):
            raise unsupported(
                "chat_template_kwargs", f"{wrong[0]} is not a variable of a chat template; omit it"
            )
        tools = [] if self.tools.choice == "none" else [dict(tool) for tool in self.tools.functions]
        return {**self.chat_template_kwargs, "tools": tools} if tools else dict(self.chat_template_kwargs)

    def with_suffix(self, suffix: str, model: ModelInfo, field: str = "suffix") -> "GenerateRequest":
        """The request with text after the answer, and tokens that end the answer before it.

        Args:
            suffix: The text.
            model: The model that answers.
            field: Field of the body.

        Raises:
            ApiError: The model's tokenizer has no marks for it, or the prompt is not text.
        """
        if (ends := model.infill_ends) is None:
            raise unsupported(field, "this model's tokenizer has no infill tokens; omit it")
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
class ContentDelta:
    """More visible text of a choice. logprobs: of each token, where they were asked for."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning of a choice."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A whole call of a tool. index: of the call in its choice; arguments: a JSON object, as text."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
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


EngineEvent = (
    Prefill | PassProgress | TreeSeen | PassStats
)  # for display, if a `GenerateRequest` sets `trees`
Delta = ContentDelta | ReasoningDelta | ToolCallDelta | ChoiceFinished | Usage | EngineEvent
