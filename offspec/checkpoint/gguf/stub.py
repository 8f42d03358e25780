"""A small GGUF file with the metadata of a large one, for transformers to read.

transformers' reader trusts every length and walks every string of a vocabulary. The stub is written from
validated values, omits the vocabulary if it is not needed, and has one zero for each tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offspec.checkpoint.gguf.architectures import architecture_of
from offspec.checkpoint.gguf.header import GgufHeader


def write_stub(header: GgufHeader, path: Path, *, tokens: bool) -> None:
    """Write the stub of a GGUF file to `path`, with or without the vocabulary."""
    import gguf
    import numpy as np

    kinds = gguf.GGUFValueType
    family = architecture_of(header)
    writer = gguf.GGUFWriter(path, family.read_as or family.arch)
    for key, value in _relevant(header, tokens).items():
        match value:
            case list():
                writer.add_array(key, value)
            case bool():
                writer.add_key_value(key, value, kinds.BOOL)
            case int():
                writer.add_key_value(key, value, kinds.INT64 if value < 2**63 else kinds.UINT64)
            case float():
                writer.add_key_value(key, value, kinds.FLOAT64)
            case str():
                writer.add_key_value(key, value, kinds.STRING)
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _relevant(header: GgufHeader, tokens: bool) -> Mapping[str, Any]:
    """Return keys about architecture and tokenizer; not the name, from which transformers would guess."""
    family = architecture_of(header)
    arch, unread = family.arch, family.unread
    kept = {
        (family.read_as or arch) + key.removeprefix(arch): value
        for key, value in header.metadata.items()
        if key.startswith(f"{arch}.") and not (unread and unread in key)
    }
    if tokens:
        return kept | {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
    return kept | {"tokenizer.ggml.tokens": ["-"]}  # without tokens, transformers warns that it guesses


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings about defaults that are overwritten right after."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
