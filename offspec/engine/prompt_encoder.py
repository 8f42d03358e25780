"""Conversion of text to tokens and back, for an engine; usable from any thread, also during answers."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from offspec.chat.answer_parser import AnswerParser, PlainTextParser
from offspec.chat.prompt_reuse import OPENED
from offspec.core.config import Constraint, SamplingParams
from offspec.core.errors import ContextLengthError, RequestError
from offspec.core.model_info import ModelInfo
from offspec.model import answer_formats
from offspec.model.prompt import Prompt, checked_text
from offspec.model.tool_call_grammars import after_reasoning, answer_regions, required_call_regions
from offspec.model.vocabulary import token_bytes
from offspec.plan.load import Assembly
from offspec.sampling.logits_rules import check_tokens

log = logging.getLogger("offspec.engine")

_OPENING = 32  # tokens at the end of a prompt that may begin reasoning


def too_long(tokens: int, context: int) -> str:
    """Return the message for a prompt that leaves no room for an answer, in words that clients search for.

    Args:
        tokens: Tokens of the prompt. Above 2 * context: the tokens counted so far.
        context: Maximum tokens of prompt and answer.
    """
    more = " (counting stopped here)" if tokens > 2 * context else ""
    return (
        f"the prompt is too long: {tokens} tokens > {context - 1} maximum{more}; the maximum context length "
        f"is {context} tokens, answer included: shorten the prompt, or load with a larger `context`"
    )


class PromptEncoder:
    """Encodes prompts and decodes tokens, without running a pass."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its answer together."""
        return self._assembly.context

    @property
    def sampling_defaults(self) -> SamplingParams:
        """Sampling parameters from the model's generation_config.json; greedy if it sets none.

        The commands use them. In Python, pass them as `params`, or a copy made by `dataclasses.replace`.
        """
        return self._assembly.codec.sampling_defaults

    def count_tokens(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the number of tokens of a prompt, including the chat template.

        `context` must have room for these tokens and the answer.

        Args:
            prompt: As in `stream`, of any length.
            raw: As in `stream`.
            chat_template_kwargs: As in `stream`.

        Raises:
            RequestError: The prompt is invalid, or the chat template refuses it.
        """
        return len(self._ids(prompt, raw, chat_template_kwargs))

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continues: bool = True,
    ) -> list[int]:
        """Return the token ids of a prompt that leaves room for an answer; usable from any thread.

        Args:
            prompt: As in `stream`.
            raw: As in `stream`.
            chat_template_kwargs: As in `stream`; "tools" describes functions that the model may call.
            continues: Whether the answer continues a last message of the assistant; otherwise it follows it.

        Raises:
            ContextLengthError: The prompt leaves no room for an answer.
            RequestError: The prompt is invalid, or the chat template refuses it.
        """
        return self._fitting(self._ids(prompt, raw, chat_template_kwargs, self.context, continues))

    def _fitting(self, ids: list[int]) -> list[int]:
        """Return the ids. Raises ContextLengthError if they leave no room for an answer."""
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
        """Return the token ids of a prompt; see `TextCodec.encode_prompt`. Raises RequestError."""
        ids = self._assembly.codec.with_template_kwargs(template).encode_prompt(prompt, raw, most, continues)
        size = self._assembly.target.skeleton.vocab_size
        if not all(0 <= token < size for token in ids):
            raise RequestError(
                f"the prompt has a token id outside the vocabulary: ids go from 0 to {size - 1}"
            )
        return ids

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text, without applying the chat template.

        Args:
            text: The text.
            special: Whether to add the special tokens that the tokenizer puts around a text. Default False.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        return self._assembly.codec.tokenize(checked_text(text), special=special)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the token ids of a prompt for the text between a prefix and a suffix (fill-in-the-middle).

        Raises:
            ContextLengthError: The prompt leaves no room for an answer.
            RequestError: The model's tokenizer lacks fill-in-the-middle tokens.
        """
        return self._fitting(self._assembly.codec.encode_infill(prefix, suffix, self.context))

    @cached_property
    def model_info(self) -> ModelInfo:
        """Facts about the model, from its files."""
        target, codec = self._assembly.target, self._assembly.codec
        kinds, marks = answer_formats.kinds(codec), codec.fim_tokens
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
        """Raise RequestError if parameters name tokens outside the vocabulary; usable from any thread."""
        check_tokens(params, self._assembly.target.skeleton.vocab_size)

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._assembly.codec.decode_with_special(ids)

    def parts(self, ids: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> AnswerParser:
        """Return a parser that splits the text of an answer into reasoning, tool calls and content.

        Args:
            ids: Token ids of the prompt, rendered by the chat template.
            tools: Functions that may be called, as {"type": "function", "function": {...}}.
        """
        codec = self._assembly.codec
        make = answer_formats.find_parts_factory(codec, calls=bool(tools))
        return make(codec.decode_with_special(ids), tools) if make else PlainTextParser()

    def answer_format(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        format: Constraint | None = None,
        thought_tokens: int | None = None,
        required: bool = False,
    ) -> Constraint | None:
        """Return the output format of an answer that may contain reasoning or tool calls; None if it is free.

        Args:
            ids: Token ids of the prompt, rendered by the chat template.
            tools: Functions that may be called, as in `parts`. After the opening mark of a call, only a
                complete, valid call is possible.
            format: Format of the text after the reasoning, which excludes tool calls. None: any text.
            thought_tokens: Maximum tokens of reasoning before a format. None: no limit.
            required: Whether the answer must be a tool call. Default False.
        """
        codec = self._assembly.codec
        template = codec.answer_marks
        thinking = OPENED.search(codec.decode_with_special(ids[-_OPENING:])) is not None
        special = codec.special_tokens
        if format is not None:
            return after_reasoning(template, format, special, thought_tokens) if thinking else format
        if getattr(codec.tokenizer, "response_template", None):
            return None  # it defines how to parse calls, not how to write them
        functions = [*{tool["function"]["name"]: tool["function"] for tool in tools}.values()]
        try:
            if required:
                regions = required_call_regions(template, functions, special, thinking, thought_tokens)
            else:
                regions = answer_regions(template, functions, special, thinking)
            for grammar in regions.grammars if regions else ():
                codec.grammars.compiled(grammar)
        except Exception as error:  # grammars do not support this tokenizer or schema: leave calls free
            log.info("calls of these tools are not constrained by a grammar: %s", error)
            return None
        return None if regions is None else regions.constraint()

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token within a text; they may be part of a character."""
        return token_bytes(self._assembly.codec.tokenizer, token)
