"""Requests and answer deltas, independent of the API."""

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
# Arguments of transformers' `apply_chat_template`, with which a client could do more than set a variable.
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
        raw: Whether to use text without the chat template.
        suffix: Text that follows the answer, for infill. None: no infill.
        echo: Whether the answer begins with the text of the prompt, and with its log-probabilities if
            `params` request them.
        params: Sampling parameters.
        tools: Tools that the model may call.
        parallel_calls: Whether an answer may call several tools. If not, it ends with its first call.
        chat_template_kwargs: Variables of the chat template, such as enable_thinking.
        continue_final_message: Whether the answer continues a final message of the assistant.
        one_call: Whether the answer is a JSON object with the name and the arguments of a call.
        prompt_only: Whether to compute only the prompt and return no text.
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
        if invalid_names := sorted(_NO_VARIABLES & self.chat_template_kwargs.keys()):
            raise unsupported(
                "chat_template_kwargs", f"{invalid_names[0]} is not a variable of a chat template; omit it"
            )
        tools = [] if self.tools.choice == "none" else [dict(tool) for tool in self.tools.functions]
        return {**self.chat_template_kwargs, "tools": tools} if tools else dict(self.chat_template_kwargs)

    def with_suffix(self, suffix: str, model: ModelInfo, field: str = "suffix") -> "GenerateRequest":
        """Return an infill request: the answer is the text between the prompt and a suffix.

        Args:
            suffix: Text that follows the answer.
            model: Model that answers; its infill tokens end the answer.
            field: Field of the body with the suffix, for errors.

        Raises:
            ApiError: The model's tokenizer has no infill tokens, or the prompt is not text.
        """
        if (ends := model.infill_ends) is None:
            raise unsupported(field, "this model's tokenizer has no infill tokens; omit it")
        if not isinstance(self.prompt, str):
            raise invalid(field, "the prompt must be text")
        params = replace(self.params, stop_token_ids=(*self.params.stop_token_ids, *ends))
        return replace(self, raw=True, suffix=suffix, params=params)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Token with its log-probability.

    utf8: bytes of the token, which may be part of a character. logprob: in nats; None for the first token of
    a prompt. top: most likely tokens at this position, most likely first.
    """

    text: str
    utf8: bytes
    logprob: float | None
    top: tuple["TokenChoice", ...] = ()


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Next piece of a choice's visible text. logprobs: one per token if requested, else empty."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Next piece of a choice's reasoning."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Complete tool call. index: number of the call in its choice. arguments: JSON object, as text."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """End of a choice. stop: stop string that ended it, or None."""

    choice: int
    reason: EndReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the answer, sent as its last delta. cached_tokens: prompt tokens read from a cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*map(add, astuple(self), astuple(other)))


# For display, if a `GenerateRequest` sets `trees`.
EngineEvent = Prefill | PassProgress | TreeSeen | PassStats
Delta = ContentDelta | ReasoningDelta | ToolCallDelta | ChoiceFinished | Usage | EngineEvent
