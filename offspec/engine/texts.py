"""What an engine knows of text and tokens, from any thread, while others read streams."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from offspec.chat.answer_parts import Parts, PlainText
from offspec.chat.prompt_reuse import OPENED
from offspec.core.config import Constraint, SamplingParams
from offspec.core.errors import ContextLengthError, RequestError
from offspec.core.model_info import ModelInfo
from offspec.model import answer_formats
from offspec.model.call_grammars import after_thought, answer_regions, only_calls
from offspec.model.prompt import Prompt, checked_text
from offspec.model.vocabulary import token_bytes
from offspec.plan.load import Assembly
from offspec.sampling.rules import check_tokens

log = logging.getLogger("offspec.engine")

_OPENING = 32  # tokens at the end of a prompt that may begin reasoning


def too_long(tokens: int, context: int) -> str:
    """The message for a prompt that leaves no room for an answer, in words that clients look for.

    tokens: of the prompt; above 2 * context, those counted so far. context: room for prompt and answer.
    """
    more = ", and more follow" if tokens > 2 * context else ""
    return (
        f"the prompt is too long: {tokens} tokens > {context - 1} maximum{more}; the maximum context length "
        f"is {context} tokens, answer included: shorten the prompt, or load with a larger `context`"
    )


class Texts:
    """Prompts become tokens, and tokens text; no pass is run."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._assembly.context

    @property
    def sampling_defaults(self) -> SamplingParams:
        """Sampling parameters that the model sets in its generation_config.json; greedy if it sets none.

        The commands use them. In Python pass them, or a copy by `dataclasses.replace`, as `params`.
        """
        return self._assembly.codec.sampling_defaults

    def count_tokens(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens that a prompt has, those of the chat template included; `context` has room for them and the
        answer.

        Args:
            prompt: As in `stream`, of any length.
            raw: As in `stream`.
            chat_template_kwargs: As in `stream`.

        Raises:
            RequestError: It is no prompt, or the chat template refuses it.
        """
        return len(self._ids(prompt, raw, chat_template_kwargs))

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continues: bool = True,
    ) -> list[int]:
        """Token ids of a prompt that leaves room for an answer; from any thread, while others read streams.

        Args:
            prompt: As in `stream`.
            raw: As in `stream`.
            chat_template_kwargs: As in `stream`; "tools" are descriptions of functions for the model to call.
            continues: Whether the answer continues a last message of the assistant, or follows it.

        Raises:
            ContextLengthError: The context has no room for it.
            RequestError: It is no prompt, or the chat template refuses it.
        """
        return self._fitting(self._ids(prompt, raw, chat_template_kwargs, self.context, continues))

    def _fitting(self, ids: list[int]) -> list[int]:
        """The ids of a prompt. Raises ContextLengthError if they leave no room for an answer."""
        if len(ids) >= self.context:
            raise ContextLengthError(too_long(len(ids), self.context))
        return ids

    def _ids(
        self,
        prompt: Prompt,
        raw: bool,
        template: Mapping[str, Any] | None,
        most: int | None = None,
        continues: bool = True,
    ) -> list[int]:
        """Token ids of a prompt; see `TextCodec.encode_prompt`. Raises RequestError."""
        ids = self._assembly.codec.with_template(template).encode_prompt(prompt, raw, most, continues)
        size = self._assembly.target.skeleton.vocab_size
        if not all(0 <= token < size for token in ids):
            raise RequestError(
                f"the prompt has a token that the model does not know: ids go from 0 to {size - 1}"
            )
        return ids

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Token ids of any text.

        Args:
            text: As it is, without the chat template.
            special: Add the special tokens that the tokenizer puts around a text.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        return self._assembly.codec.tokenize(checked_text(text), special=special)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt for the text between a prefix and a suffix.

        Raises:
            ContextLengthError: The context has no room for it.
            RequestError: The model's tokenizer has no marks for it.
        """
        return self._fitting(self._assembly.codec.encode_infill(prefix, suffix, self.context))

    @cached_property
    def model_info(self) -> ModelInfo:
        """Facts about the model, from its files."""
        target, codec = self._assembly.target, self._assembly.codec
        kinds, marks = answer_formats.kinds(codec), codec.infill_marks
        return ModelInfo(
            architecture=str(target.skeleton.config.model_type),
            parameters=target.parameters,
            nbytes=target.stored_bytes,
            weights=target.stored_format,
            file_format=target.file_format,
            vocabulary=target.skeleton.vocab_size,
            bos_token=str(codec.tokenizer.bos_token or ""),
            eos_token=str(codec.tokenizer.eos_token or ""),
            chat_template=str(codec.tokenizer.chat_template or ""),
            tools="call" in kinds,
            thinking="thought" in kinds,
            infill_ends=None if marks is None else marks.ends,
        )

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError where parameters name tokens that the model does not have; from any thread."""
        check_tokens(params, self._assembly.target.skeleton.vocab_size)

    def spell(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._assembly.codec.spell(ids)

    def parts(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> Parts:
        """What takes the text of an answer apart into thoughts, calls of tools and the rest.

        Args:
            ids: The prompt, written by the chat template.
            tools: What may be called, as {"type": "function", "function": {...}}.
        """
        codec = self._assembly.codec
        make = answer_formats.find(codec, calls=bool(tools))
        return make(codec.spell(ids), tools) if make else PlainText()

    def answer_format(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        format: Constraint | None = None,
        thought_tokens: int | None = None,
        required: bool = False,
    ) -> Constraint | None:
        """The format of an answer, where reasoning comes before it, or where it may call tools.

        Args:
            ids: The prompt, written by the chat template.
            tools: What may be called, as in `parts`: from its opening mark on a call is whole and valid.
            format: What the answer must look like after its reasoning; then there are no calls. None:
                anything.
            thought_tokens: Most tokens of the reasoning before a format. None: any number.
            required: The answer must be a call.
        """
        codec = self._assembly.codec
        template = codec.answer_marks
        thinking = OPENED.search(codec.spell(ids[-_OPENING:])) is not None
        special = codec.special_tokens
        if format is not None:
            return after_thought(template, format, special, thought_tokens) if thinking else format
        if getattr(codec.tokenizer, "response_template", None):
            return None  # it says how calls are read, and not how they are written
        functions = [*{tool["function"]["name"]: tool["function"] for tool in tools}.values()]
        try:
            if required:
                regions = only_calls(template, functions, special, thinking, thought_tokens)
            else:
                regions = answer_regions(template, functions, special, thinking)
            for grammar in regions.grammars if regions else ():
                codec.grammars.compiled(grammar)
        except Exception as error:  # a tokenizer or a schema that grammars cannot follow: calls are free
            log.info("calls of these tools follow no grammar: %s", error)
            return None
        return None if regions is None else regions.constraint()

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for within a text, in UTF-8; it may be a part of a character."""
        return token_bytes(self._assembly.codec.tokenizer, token)
