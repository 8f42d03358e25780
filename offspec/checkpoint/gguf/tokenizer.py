"""Writing the tokenizer, chat template and stop ids of a GGUF file as the files that transformers reads."""

from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader, special_id
from offspec.checkpoint.gguf.stub import write_stub
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.ranges import INSTEAD, one_line
from offspec.core.errors import DiskFullError, OffspecError, UnsupportedModelError
from offspec.core.events import Event, Notice
from offspec.core.files import as_disk_full_error, temporary_folder
from offspec.core.rust_panics import panics_as_errors

# llama.cpp's names of pre-tokenizers that split like GPT-2's, transformers' default, except that every digit
# is a piece of its own.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_LIKE_GPT2 = {"gpt-2", "gpt2", "olmo", "mpt", "jais", "phi-2", "trillion", "granite-docling", "mellum"}
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|return|>")
_CONTROL = 3
# Keys of llama.cpp's converter, without "general.sampling.", and their names in generation_config.json.
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
        notify(Notice(f"text may be tokenized differently than {header.path.name} specifies: {_UPDATE}"))
    with temporary_folder() as outline:
        try:
            with as_disk_full_error(outline):
                write_stub(header, outline / "outline.gguf", tokens=True)
            with panics_as_errors():
                tokenizer = PreTrainedTokenizerFast.from_pretrained(outline, gguf_file="outline.gguf")
                _set_pre_tokenizer(tokenizer, header, notify)
                tokenizer.save_pretrained(folder)
        except OffspecError:
            raise
        except Exception as error:  # the tokenizers library raises plain Exception
            if "os error 28" in str(error):
                raise DiskFullError(f"the disk filled up while writing {folder}: free some space") from error
            update = "" if builds_tokenizers() else f"{_UPDATE}, or "
            raise UnsupportedModelError(
                f"the tokenizer in {header.path} cannot be rebuilt ({one_line(error)}): {update}{INSTEAD}"
            ) from error
    write_json(folder / "generation_config.json", _generation(header, tokenizer))


def sampling_defaults(header: GgufHeader) -> dict[str, Any]:
    """Return the sampling parameters that the file sets, by their names in generation_config.json."""
    values = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> int | float | str:
    """Convert a value of the file to JSON: 0.95, for which the file has the float32 0.949999988."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value if isinstance(value, int) else str(value)[:40]


def builds_tokenizers() -> bool:
    """Return whether transformers builds the tokenizer that a GGUF file specifies.

    Before 5.18 it goes by the architecture alone, and ignores the rules for splitting text and adding tokens.
    """
    from packaging.version import Version

    return Version(installed_version("transformers")) >= Version("5.18")


def _set_pre_tokenizer(tokenizer: Any, header: GgufHeader, notify: Callable[[Event], None]) -> None:
    """Set the pre-tokenizer that the model's vocabulary expects, if transformers does not know it."""
    from tokenizers import pre_tokenizers

    name = header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    if name in _SINGLE_DIGITS:
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif builds_tokenizers() and name not in _LIKE_GPT2 | _known_to_transformers():
        notify(Notice(f"unknown pre-tokenizer {str(name)[:40]!r}: text is split as by GPT-2's"))


def _known_to_transformers() -> set[str]:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return set(getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()))


def _generation(header: GgufHeader, tokenizer: Any) -> dict[str, Any]:
    """Return the ids that begin, end (also a turn) and pad a text, and the sampling defaults."""
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
