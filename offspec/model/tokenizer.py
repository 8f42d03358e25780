"""Prompts in: a model's tokenizer, its chat template, and what its folder says about endings."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offspec.core.errors import CheckpointError, ModelNotFoundError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Tokens that only fill the vocabulary up to the size of the embedding, as GGUF files have them.
_PADDING = re.compile(r"[<\[|]*(pad|unused|extra|reserved|dummy)[a-z_]*?[ _-]*\d+[>\]|]*", re.IGNORECASE)


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer that lies beside a checkpoint. Raises CheckpointError; runs no code of the folder."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder, so it holds no tokenizer")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added: dict[int, Any] = tokenizer.added_tokens_decoder
    except Exception as error:  # the parsers of a dozen formats, each with errors of its own
        raise CheckpointError(f"{folder} holds no tokenizer that can be read: {_one_line(error)}") from error
    # Without its files a tokenizer is not refused: it is made, and knows its special tokens alone.
    if set(vocabulary.values()) <= added.keys():
        raise CheckpointError(f"{folder} holds no tokenizer; add tokenizer.json and tokenizer_config.json")
    return tokenizer


def same_vocabulary(a: "PreTrainedTokenizerBase", b: "PreTrainedTokenizerBase") -> str | None:
    """None when both give the same ids to the same tokens, else one line that says where they differ.

    Numbered filler at the end of one of them (`[PAD151700]`, `<unused7>`) is no difference.
    """
    first, second = ({i: token for token, i in x.get_vocab().items()} for x in (a, b))
    different = [i for i in first.keys() | second.keys() if first.get(i) != second.get(i)]
    shared = min(max(first, default=-1), max(second, default=-1))
    different = [
        i for i in different if i <= shared or not _PADDING.fullmatch(first.get(i) or second.get(i) or "")
    ]
    if not different:
        return None
    where = min(different)
    tokens = [repr(x[where]) if where in x else "nothing" for x in (first, second)]
    sizes = f"{len(first)} and {len(second)} tokens" if len(first) != len(second) else f"{len(first)} tokens"
    return f"token {where} is {tokens[0]} in one and {tokens[1]} in the other ({sizes})"


class TextCodec:
    """A model's tokenizer with what its folder says about prompts and endings.

    config: the parsed config.json. eos_ids: the tokens that end an answer. hidden_ids: the special tokens,
    which never show in text. Raises CheckpointError when generation_config.json is damaged.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", folder: Path, config: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.hidden_ids = frozenset(tokenizer.all_special_ids) | {i for i, t in added.items() if t.special}
        generation = _read_json(folder / "generation_config.json")
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

    def encode_prompt(self, prompt: str | Messages, raw: bool = False) -> list[int]:
        """Token ids of a prompt, at least one. Raises RequestError.

        raw encodes a string plainly, with the special tokens that the tokenizer itself puts around it.
        Otherwise the chat template is used, for a list of {"role", "content"} messages or, given a
        string, for one message of the user; the answer is the assistant's.
        """
        if raw:
            if not isinstance(prompt, str):
                raise RequestError("a raw prompt must be a string; messages need the chat template")
            text = _checked(prompt)
        else:
            text = self.render([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if not (text if raw else text.strip()):
            raise RequestError("the prompt is empty")
        ids = self.tokenize(text, special=raw)  # a template writes the special tokens itself
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        return ids

    def render(self, messages: Messages) -> str:
        """Messages as the chat template writes them, up to where the answer begins. Raises RequestError."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; pass the prompt as plain text with --raw")
        checked = _checked_messages(messages)
        text, failure = "", None
        try:
            text = self._written(checked)
        except Exception as error:  # a template is a program: it may raise anything
            failure = error
        if failure or not _says_all(checked, text):
            parts = [{**message, "content": [_text_part(message["content"])]} for message in checked]
            with suppress(Exception):
                other = self._written(parts)
                if _says_all(checked, other):
                    return other
        if failure:
            reason = f"the model's chat template refuses the prompt: {_one_line(failure)}"
            raise RequestError(reason) from failure
        return text

    def _written(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Messages as the chat template writes them. Raises whatever it raises."""
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of text; special: with those that the tokenizer itself puts around it."""
        # Not verbose: how long a prompt may be is decided by the model and the memory, not by a number in
        # the tokenizer's configuration.
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def spell(self, ids: Iterable[int]) -> str:
        """The text of token ids with the special tokens in it, as a chat template would write it."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out, spaces as the tokens have them."""
        shown = [i for i in ids if i not in self.hidden_ids]
        # Tidying spaces up ("Hello ." to "Hello.") would change text that was already shown.
        text = self.tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _read_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file, empty when there is no such file. Raises CheckpointError."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {_one_line(error)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} should hold a JSON object")
    return data


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the prompt is not valid Unicode text") from None
    return text


def _text_part(text: str) -> dict[str, str]:
    """Content as templates of models that see expect it: a list of parts, in which a string is nothing."""
    return {"type": "text", "text": text}


def _says_all(messages: Messages, text: str) -> bool:
    """Whether what a template wrote has all that the user says."""
    return all(message["content"].strip() in text for message in messages if message["role"] == "user")


def _refuse_pictures(content: object) -> None:
    """Raise RequestError, by its kind, for a part of a message that is no text."""
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise RequestError(
                f"a message has a part of type {kind[:40]!a}: offspec runs the language "
                "model of such models alone, on text; pictures, sound and video are not read"
            )


def _checked_messages(messages: Messages) -> list[dict[str, str]]:
    """Messages as a template expects them. Raises RequestError."""
    if not isinstance(messages, Sequence):
        raise RequestError("a prompt must be a string or a list of messages")
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError('a message must look like {"role": "user", "content": "..."}')
        if message.get("role") not in _ROLES:
            raise RequestError(
                f"a message's role must be one of {', '.join(_ROLES)}, not {message.get('role')!r}"
            )
        _refuse_pictures(message.get("content"))
        if not isinstance(message.get("content"), str):
            raise RequestError(f"the content of a {message['role']} message must be a string")
        _checked(message["content"])
    if not any(message["content"].strip() for message in messages):
        raise RequestError("the prompt is empty")
    return [dict(message) for message in messages]
