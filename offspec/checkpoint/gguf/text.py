"""The tokenizer of a GGUF file, its chat template and its stop ids, as the files transformers reads."""

from collections.abc import Callable
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader, special_id
from offspec.checkpoint.gguf.stub import write_outline
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.ranges import INSTEAD, one_line
from offspec.core.errors import DiskFullError, OffspecError, UnsupportedModelError
from offspec.core.events import Event, Notice
from offspec.core.files import disk_full, scratch_folder
from offspec.core.panics import panics_as_errors

# Names that llama.cpp gives to ways of cutting text before merging. GPT-2's way is the default of
# transformers; these add to it that every digit stands alone.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_LIKE_GPT2 = {"gpt-2", "gpt2", "olmo", "mpt", "jais", "phi-2", "trillion", "granite-docling", "mellum"}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|return|>")
_CONTROL = 3
# Keys of llama.cpp's converter, less "general.sampling.", and what generation_config.json calls them.
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_UPDATE = "update transformers to 5.18 or later"


def write_text_files(header: GgufHeader, folder: Path, notify: Callable[[Event], None]) -> None:
    """Write tokenizer.json, tokenizer_config.json, the chat template and generation_config.json.

    Raises UnsupportedModelError for a vocabulary that transformers cannot rebuild, DiskFullError.
    """
    from transformers import PreTrainedTokenizerFast

    if not builds_tokenizers():
        notify(Notice(f"text may be tokenized differently from what {header.path.name} describes: {_UPDATE}"))
    with scratch_folder() as outline:
        try:
            with disk_full(outline):
                write_outline(header, outline / "outline.gguf", tokens=True)
            with panics_as_errors():
                tokenizer = PreTrainedTokenizerFast.from_pretrained(outline, gguf_file="outline.gguf")
                _cut_like_the_model(tokenizer, header, notify)
                tokenizer.save_pretrained(folder)
        except OffspecError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            if "os error 28" in str(error):
                raise DiskFullError(f"the disk filled up while writing {folder}: make room there") from error
            update = "" if builds_tokenizers() else f"{_UPDATE}, or "
            raise UnsupportedModelError(
                f"the tokenizer in {header.path} cannot be rebuilt ({one_line(error)}): {update}{INSTEAD}"
            ) from error
    write_json(folder / "generation_config.json", _generation(header, tokenizer))


def sampling_defaults(header: GgufHeader) -> dict[str, Any]:
    """The sampling parameters that the file sets, by their names in generation_config.json."""
    values = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> int | float | str:
    """A value of the file for JSON: 0.95, of which the file has the nearest float32, 0.949999988."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value if isinstance(value, int) else str(value)[:40]


def builds_tokenizers() -> bool:
    """Return whether transformers builds the tokenizer that a GGUF file describes.

    Before 5.18 it goes by the architecture alone, and ignores the rules for splitting text and adding tokens.
    """
    from packaging.version import Version

    return Version(installed("transformers")) >= Version("5.18")


def _cut_like_the_model(tokenizer: Any, header: GgufHeader, notify: Callable[[Event], None]) -> None:
    """Split text before merging as the model's vocabulary expects, where transformers does not know how."""
    from tokenizers import pre_tokenizers

    name = header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    if name in _SINGLE_DIGITS:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif builds_tokenizers() and name not in _LIKE_GPT2 | _known_to_transformers():
        notify(Notice(f"the tokenizer's rules for cutting text, {str(name)[:40]!r}, are taken to be GPT-2's"))


def _known_to_transformers() -> set[str]:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as known

    return set(getattr(known, "GGUF_PRE_TOKENIZER_SPLITS", ()))


def _generation(header: GgufHeader, tokenizer: Any) -> dict[str, Any]:
    """The ids that begin, end and pad a text (a turn may end in more ways), and the sampling defaults."""
    ids = {name: special_id(header, name) for name in ("bos", "eos", "padding", "eot", "eom")}
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, list) else []
    template = str(tokenizer.chat_template or "")
    ends = [ids["eos"], ids["eot"], ids["eom"]]
    for text in _END_OF_TURN:
        number = tokenizer.convert_tokens_to_ids(text) if text in template else None
        if number is not None and number < len(kinds) and kinds[number] == _CONTROL:
            ends.append(number)
    unique = list(dict.fromkeys(number for number in ends if number is not None))
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": unique[0] if len(unique) == 1 else unique,
        "pad_token_id": ids["padding"],
        **sampling_defaults(header),
    }
    return {key: value for key, value in found.items() if value not in (None, [])}
