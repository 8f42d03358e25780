"""Conversion of prompts to token ids with a model's tokenizer, chat template and end-of-sequence tokens."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.ranges import one_line
from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError, ModelNotFoundError, RequestError
from offspec.core.rust_panics import panics_as_errors
from offspec.core.sampling_defaults import model_defaults
from offspec.core.values import short_repr
from offspec.model.chat_template import CALL_MARK, render, supports_tools
from offspec.model.prompt import Messages, Prompt, checked_text, token_ids
from offspec.model.vocabulary import FimTokens, find_fim_tokens
from offspec.sampling.grammar import Grammars

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_NO_TOKENIZER = "has no tokenizer; add tokenizer.json and tokenizer_config.json"
# Prefixes of vocabulary file names.
_VOCABULARIES = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "spm", "tekken", "tiktoken")
_BEGINNING = 2**16  # minimum characters of a beginning that is tokenized alone
_ROOMY = 8  # characters per token, more than nearly any text has on average
# Arguments of transformers' function that are set here, and so are not template variables.
_SETTLED = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in a checkpoint folder without running code from it. Raises CheckpointError."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder, so it has no tokenizer")
    from transformers import AutoTokenizer

    _refuse_other_files(folder)
    try:
        with panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            vocabulary: dict[str, int] = tokenizer.get_vocab()
            added: dict[int, Any] = tokenizer.added_tokens_decoder
    except Exception as error:  # parsers of a dozen formats raise different errors
        if not any(file.name.startswith(_VOCABULARIES) for file in folder.iterdir()):
            raise CheckpointError(f"{folder} {_NO_TOKENIZER}") from error
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {one_line(error)}") from error
    # If its files are missing, transformers does not fail but creates a tokenizer with special tokens only.
    if set(vocabulary.values()) <= added.keys():
        raise CheckpointError(f"{folder} {_NO_TOKENIZER}")
    return tokenizer


def _refuse_other_files(folder: Path) -> None:
    """Raise CheckpointError if the configuration refers to files that offspec has not checked."""
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    others = config.get("fast_tokenizer_files")
    if others and others != ["tokenizer.json"]:
        raise CheckpointError(
            f"{file} names other files to be read instead of tokenizer.json: "
            "remove fast_tokenizer_files from it"
        )


class TextCodec:
    """A model's tokenizer, with the settings of its folder for prompts, sampling and ends of answers.

    Attributes:
        eos_ids: Tokens that end an answer.
        special_ids: Special tokens, which are never shown in text.
        sampling_defaults: Default sampling parameters.
        sampling_warning: Why those of generation_config.json are ignored, or None.

    Args:
        tokenizer: Tokenizer of the model.
        folder: Checkpoint folder.
        config: Parsed config.json.

    Raises:
        CheckpointError: generation_config.json is damaged.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", folder: Path, config: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        self._variables: dict[str, Any] = {}  # additional variables for the chat template
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        file = folder / "generation_config.json"
        generation = read_json(file) if file.exists() else {}
        self.sampling_defaults, self.sampling_warning = SamplingParams(), None
        try:
            self.sampling_defaults = model_defaults(generation)
        except RequestError as error:
            ignored = f"the sampling defaults of {file} are ignored and the default is temperature 0: {error}"
            self.sampling_warning = ignored
        nested = config.get("text_config")
        sources = (generation, config, nested if isinstance(nested, Mapping) else {})
        self.eos_ids = frozenset(
            i
            for value in (*(source.get("eos_token_id") for source in sources), tokenizer.eos_token_id)
            for i in (value if isinstance(value, list) else [value])
            if isinstance(i, int) and not isinstance(i, bool) and i >= 0
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def answer_marks(self) -> str:
        """Text with all marks that answers may have: the chat template, and offspec's tool mark if used."""
        template = str(self.tokenizer.chat_template or "")
        return template if supports_tools(self.tokenizer) else template + CALL_MARK

    @cached_property
    def grammar_tokenizer(self) -> "LLTokenizer":
        """Tokenizer for grammars, with the bytes of every token; made once, in about a second.

        Raises RequestError if the bytes are unknown, or if there is no end-of-sequence token.
        """
        from llguidance.hf import from_tokenizer

        known: set[int] = set(self.tokenizer.get_vocab().values())
        ends = sorted(self.eos_ids & known)
        if not ends:
            raise RequestError("this model has no end-of-sequence token, which a constrained answer needs")
        try:
            return from_tokenizer(cast("PreTrainedTokenizerFast", self.tokenizer), eos_token=ends)
        except ValueError as error:
            reason = f"this model's tokenizer does not support constrained answers: {one_line(error)}"
            raise RequestError(reason) from error

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by name."""
        return {self.decode_with_special([i]): i for i in self.special_ids}

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of grammars for parts of answers. Raises RequestError as `grammar_tokenizer` does."""
        return Grammars(self.grammar_tokenizer)

    def with_template_kwargs(self, variables: Mapping[str, Any] | None) -> "TextCodec":
        """Return a copy with chat template variables such as enable_thinking. Raises RequestError."""
        if not variables:
            return self
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise RequestError(
                f"chat_template_kwargs must be a mapping from names to values, not {short_repr(variables)}"
            )
        if settled := _SETTLED & variables.keys():
            raise RequestError(f"chat_template_kwargs cannot set {min(settled)}, which offspec sets itself")
        other = copy(self)
        other._variables = dict(variables)
        return other

    def encode_prompt(
        self, prompt: Prompt, raw: bool = False, most: int | None = None, continue_final_message: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt, at least one.

        Args:
            prompt: Messages, a string, or token ids, which are returned unchanged. The chat template is
                applied to a list of {"role", "content"} messages, or to a string as one user message.
            raw: Whether to encode a string without the chat template, with only the special tokens that the
                tokenizer itself adds.
            most: If a text has more than twice this many tokens, only those of its beginning are needed.
            continue_final_message: Whether the answer continues a final assistant message instead of
                following it.

        Raises:
            RequestError: The prompt is invalid or empty.
        """
        if (ids := token_ids(prompt)) is not None:
            return ids
        if raw:
            if not isinstance(prompt, str):
                raise RequestError("a raw prompt must be a string; messages need the chat template")
            text = checked_text(prompt)
        else:
            messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self.render(messages, continue_final_message=continue_final_message)
        if not (text if raw else text.strip()):
            raise RequestError("the prompt is empty")
        # Templates add the special tokens themselves.
        ids = (most and self._beginning(text, most, special=raw)) or self.tokenize(text, special=raw)
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        return ids

    @cached_property
    def fim_tokens(self) -> FimTokens | None:
        """Fill-in-the-middle tokens, or None if the tokenizer has no known ones."""
        return find_fim_tokens(self.tokenizer.get_vocab())

    def encode_infill(self, prefix: str, suffix: str, most: int) -> list[int]:
        """Return token ids of a prompt for the text between a prefix and a suffix.

        Args:
            prefix: Text before the gap.
            suffix: Text after the gap.
            most: If a text has more than twice this many tokens, only those of its beginning are needed.

        Raises:
            RequestError: The tokenizer has no fill-in-the-middle tokens, or a text is not valid Unicode.
        """
        marks = self.fim_tokens
        if marks is None:
            raise RequestError(
                "suffix: this model's tokenizer has no fill-in-the-middle tokens; omit the suffix",
                field="suffix",
            )
        begin = [i for i in self.tokenize("", special=True) if i == self.tokenizer.bos_token_id]
        before, after = (
            self._beginning(text, most, special=False) or self.tokenize(text)
            for text in map(checked_text, (prefix, suffix))
        )
        return [*begin, marks.prefix, *before, marks.suffix, *after, marks.middle]

    def render(self, messages: Messages, *, continue_final_message: bool = False) -> str:
        """Render messages with the chat template, up to the beginning of the answer.

        Args:
            messages: Messages of the conversation.
            continue_final_message: Whether the answer continues a final assistant message. Default False: the
                answer follows it.

        Raises:
            RequestError: There is no template, or it refuses the messages.
        """
        return render(self.tokenizer, messages, self._variables, continue_final_message)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of text. `special`: whether the tokenizer adds its special tokens."""
        # Not verbose: the model and the memory limit the length of a prompt, not the tokenizer's setting.
        with self._as_checkpoint_error("encode a text"):
            ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _beginning(self, text: str, most: int, *, special: bool) -> list[int] | None:
        """Return the token ids of the beginning of a text if these are more than twice `most`, else None.

        Tokenizing a megabyte of text would take two seconds and a hundred megabytes of memory.
        """
        size = max(_BEGINNING, _ROOMY * most)
        while size < len(text):
            ids = self.tokenize(text[:size], special=special)
            if len(ids) > 2 * most:
                return ids
            size *= 4
        return None

    def decode_with_special(self, ids: Iterable[int]) -> str:
        """Decode token ids to text that includes special tokens, as a chat template would write it."""
        return self._text(list(ids), special=True)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode token ids to text without special tokens, keeping spaces as the tokens have them.

        The result equals `Result.text`. Bytes that are not UTF-8 become U+FFFD as with Python's
        `errors="replace"`, and complete characters next to them are kept. If a vocabulary has tokens for
        single bytes ("<0xFF>"), transformers' own `decode` differs: one invalid byte turns every byte of its
        run into U+FFFD, including characters that have already been shown.
        """
        return self._text([i for i in ids if i not in self.special_ids], special=False)

    def _text(self, ids: list[int], *, special: bool) -> str:
        # Cleaning up spaces ("Hello ." to "Hello.") would change text that was already shown.
        with self._as_checkpoint_error("decode tokens"):
            text = self.tokenizer.decode(
                self._mended(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        assert isinstance(text, str)
        return text

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Byte values 0 to 255 by token, for tokens of single bytes; empty if the vocabulary has none."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens: Any = self.tokenizer.convert_tokens_to_ids(names)
        known = None not in tokens and self.tokenizer.convert_ids_to_tokens(tokens) == names
        found = {token: byte for byte, token in enumerate(tokens)} if known else {}
        return found if found and self.tokenizer.decode(tokens[ord("A")]) == "A" else {}

    def _mended(self, ids: list[int]) -> list[int]:
        """Replace byte tokens that are not valid UTF-8 with the byte tokens of U+FFFD."""
        if self._bytes.keys().isdisjoint(ids):
            return ids
        mended, tokens = list[int](), [*self._bytes]
        for is_byte, run in groupby(ids, self._bytes.__contains__):
            if is_byte:
                text = bytes(self._bytes[token] for token in run).decode("utf-8", "replace")
                run = (tokens[byte] for byte in text.encode())
            mended += run
        return mended

    @contextmanager
    def _as_checkpoint_error(self, action: str) -> Iterator[None]:
        """Raise errors of a loaded tokenizer inside the block as CheckpointError."""
        try:
            with panics_as_errors():
                yield
        except Exception as error:  # from Rust, Python, or any library that its class uses
            raise CheckpointError(
                f"the tokenizer in {self.folder} cannot {action} ({one_line(error)}); download it again"
            ) from error
