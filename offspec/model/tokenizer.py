"""Token ids of prompts: a model's tokenizer, its chat template, and what its folder says about endings."""

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
from offspec.core.panics import panics_as_errors
from offspec.core.sampling_defaults import model_defaults
from offspec.core.values import shown
from offspec.model.chat_template import CALL_MARK, render, takes_tools
from offspec.model.prompt import Messages, Prompt, checked_text, token_ids
from offspec.model.vocabulary import InfillMarks, infill_marks
from offspec.sampling.grammar import Grammars

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_NO_TOKENIZER = "holds no tokenizer; add tokenizer.json and tokenizer_config.json"
# Files of tokens begin like one of these.
_VOCABULARIES = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "spm", "tekken", "tiktoken")
_BEGINNING = 2**16  # characters that are tokenised at once, whatever comes behind them
_ROOMY = 8  # characters that hardly any text has for a token, on average
# Arguments of transformers' function that are settled here, and so are no variables of a template.
_SETTLED = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer that lies beside a checkpoint. Raises CheckpointError; runs no code of the folder."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder, so it holds no tokenizer")
    from transformers import AutoTokenizer

    _refuse_other_files(folder)
    try:
        with panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            vocabulary: dict[str, int] = tokenizer.get_vocab()
            added: dict[int, Any] = tokenizer.added_tokens_decoder
    except Exception as error:  # the parsers of a dozen formats, each with errors of its own
        if not any(file.name.startswith(_VOCABULARIES) for file in folder.iterdir()):
            raise CheckpointError(f"{folder} {_NO_TOKENIZER}") from error
        raise CheckpointError(f"{folder} holds no tokenizer that can be read: {one_line(error)}") from error
    # Without its files a tokenizer is not refused: it is made, and knows its special tokens alone.
    if set(vocabulary.values()) <= added.keys():
        raise CheckpointError(f"{folder} {_NO_TOKENIZER}")
    return tokenizer


def _refuse_other_files(folder: Path) -> None:
    """Raise CheckpointError for a configuration that sends to files which nobody has looked at."""
    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    others = config.get("fast_tokenizer_files")
    if others and others != ["tokenizer.json"]:
        raise CheckpointError(
            f"{file} names other files to be read in the place of tokenizer.json: "
            "remove fast_tokenizer_files from it"
        )


class TextCodec:
    """A model's tokenizer with what its folder says about prompts and endings.

    config: the parsed config.json. eos_ids: the tokens that end an answer. hidden_ids: the special tokens,
    which never show in text. sampling_defaults: how tokens are chosen unless a user says otherwise;
    sampling_complaint: why those of generation_config.json are ignored, or None. Raises CheckpointError when
    generation_config.json is damaged.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", folder: Path, config: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        self._variables: dict[str, Any] = {}  # of the chat template, beside its own
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.hidden_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        file = folder / "generation_config.json"
        generation = read_json(file) if file.exists() else {}
        self.sampling_defaults, self.sampling_complaint = SamplingParams(), None
        try:
            self.sampling_defaults = model_defaults(generation)
        except RequestError as error:
            ignored = f"sampling defaults of {file} are ignored, so temperature 0 is the default: {error}"
            self.sampling_complaint = ignored
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
        """Text with the marks that answers may have: the chat template, and those of offspec's own prompt."""
        template = str(self.tokenizer.chat_template or "")
        return template if takes_tools(self.tokenizer) else template + CALL_MARK

    @cached_property
    def grammar_tokens(self) -> "LLTokenizer":
        """What formats are followed by: the bytes of every token. Made once, in about a second.

        Raises RequestError for a tokenizer that has none, or no end of an answer.
        """
        from llguidance.hf import from_tokenizer

        known: set[int] = set(self.tokenizer.get_vocab().values())
        ends = sorted(self.eos_ids & known)
        if not ends:
            raise RequestError("this model has no end-of-sequence token, so no answer of a format could end")
        try:
            return from_tokenizer(cast("PreTrainedTokenizerFast", self.tokenizer), eos_token=ends)
        except ValueError as error:
            reason = f"this model's tokenizer cannot follow a format: {one_line(error)}"
            raise RequestError(reason) from error

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of special tokens, by their names."""
        return {self.spell([i]): i for i in self.hidden_ids}

    @cached_property
    def grammars(self) -> Grammars:
        """Compiled grammars of parts of answers. Raises RequestError as `grammar_tokens` does."""
        return Grammars(self.grammar_tokens)

    def with_template(self, variables: Mapping[str, Any] | None) -> "TextCodec":
        """The same with variables for the chat template, such as enable_thinking. Raises RequestError."""
        if not variables:
            return self
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise RequestError(
                f"chat_template_kwargs must be a mapping from names to values, not {shown(variables)}"
            )
        if settled := _SETTLED & variables.keys():
            raise RequestError(f"chat_template_kwargs cannot set {min(settled)}: offspec does")
        other = copy(self)
        other._variables = dict(variables)
        return other

    def encode_prompt(
        self, prompt: Prompt, raw: bool = False, most: int | None = None, continues: bool = True
    ) -> list[int]:
        """Token ids of a prompt, at least one. Raises RequestError.

        most: Of a text with more than twice as many tokens, only those of its beginning need to be told.
        continues: Whether the answer continues a last message of the assistant, or follows it.

        raw encodes a string plainly, with the special tokens that the tokenizer itself puts around it.
        Otherwise the chat template is used, for a list of {"role", "content"} messages or, given a
        string, for one message of the user; the answer is the assistant's. Token ids are taken as they are.
        """
        if (ids := token_ids(prompt)) is not None:
            return ids
        if raw:
            if not isinstance(prompt, str):
                raise RequestError("a raw prompt must be a string; messages need the chat template")
            text = checked_text(prompt)
        else:
            messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = self.render(messages, continues=continues)
        if not (text if raw else text.strip()):
            raise RequestError("the prompt is empty")
        # A template writes the special tokens itself.
        ids = (most and self._beginning(text, most, special=raw)) or self.tokenize(text, special=raw)
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        return ids

    @cached_property
    def infill_marks(self) -> InfillMarks | None:
        """The marks to fill in the middle of a text; None if the tokenizer has none that are known."""
        return infill_marks(self.tokenizer.get_vocab())

    def encode_infill(self, prefix: str, suffix: str, most: int) -> list[int]:
        """Token ids of a prompt for the text between a prefix and a suffix; most: as in `encode_prompt`.

        Raises RequestError if the tokenizer has no marks for these, or a text is not valid Unicode.
        """
        marks = self.infill_marks
        if marks is None:
            raise RequestError(
                "suffix: this model's tokenizer has no marks for text before a suffix; leave it out",
                field="suffix",
            )
        begin = [i for i in self.tokenize("", special=True) if i == self.tokenizer.bos_token_id]
        before, after = (
            self._beginning(text, most, special=False) or self.tokenize(text)
            for text in map(checked_text, (prefix, suffix))
        )
        return [*begin, marks.prefix, *before, marks.suffix, *after, marks.middle]

    def render(self, messages: Messages, *, continues: bool = False) -> str:
        """Messages as the chat template writes them, up to where the answer begins.

        Args:
            messages: What was said.
            continues: Whether the answer goes on from a last message of the assistant. Default False: it
                follows that.

        Raises:
            RequestError: There is no template, or it refuses the messages.
        """
        return render(self.tokenizer, messages, self._variables, continues)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of text; special: with those that the tokenizer itself puts around it."""
        # Not verbose: how long a prompt may be is decided by the model and the memory, not by a number in
        # the tokenizer's configuration.
        with self._damage("a text"):
            ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _beginning(self, text: str, most: int, *, special: bool) -> list[int] | None:
        """Token ids of the beginning of a text, where they alone are more than twice `most`.

        A megabyte of text takes two seconds and a hundred megabytes of memory.
        """
        size = max(_BEGINNING, _ROOMY * most)
        while size < len(text):
            ids = self.tokenize(text[:size], special=special)
            if len(ids) > 2 * most:
                return ids
            size *= 4
        return None

    def spell(self, ids: Iterable[int]) -> str:
        """The text of token ids with the special tokens in it, as a chat template would write it."""
        return self._text(list(ids), special=True)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out, spaces as the tokens have them.

        `Result.text` is the same. Bytes that are not UTF-8 become U+FFFD as Python's `errors="replace"` makes
        them, and whole characters next to them stay. transformers' own `decode` does otherwise if a
        vocabulary has tokens for single bytes ("<0xFF>"): one wrong byte makes U+FFFD of every byte of its
        run, also of characters that have been shown.
        """
        return self._text([i for i in ids if i not in self.hidden_ids], special=False)

    def _text(self, ids: list[int], *, special: bool) -> str:
        # Tidying spaces up ("Hello ." to "Hello.") would change text that was already shown.
        with self._damage("tokens"):
            text = self.tokenizer.decode(
                self._mended(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        assert isinstance(text, str)
        return text

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """The byte of each token that is one, from 0 to 255; empty if the vocabulary has no such tokens."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens: Any = self.tokenizer.convert_tokens_to_ids(names)
        known = None not in tokens and self.tokenizer.convert_ids_to_tokens(tokens) == names
        found = {token: byte for byte, token in enumerate(tokens)} if known else {}
        return found if found and self.tokenizer.decode(tokens[ord("A")]) == "A" else {}

    def _mended(self, ids: list[int]) -> list[int]:
        """The tokens, with those of U+FFFD in the place of bytes that are no UTF-8."""
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
    def _damage(self, at: str) -> Iterator[None]:
        """Raise CheckpointError for what a tokenizer that loaded fails with later."""
        try:
            with panics_as_errors():
                yield
        except Exception as error:  # of Rust, of Python, of whatever its class calls
            raise CheckpointError(
                f"the tokenizer in {self.folder} fails at {at} ({one_line(error)}); download it again"
            ) from error
