"""A panic of Rust is reported as any error of a library is."""

import json
from pathlib import Path

import pytest

from offspec.core.errors import CheckpointError
from offspec.core.panics import panics_as_errors
from offspec.model.tokenizer import TextCodec, load_tokenizer
from tests.support.tokenizers import byte_level, saved


class PanicException(BaseException):
    """As pyo3 has it."""


class _Panicking:
    def convert_tokens_to_ids(self, names: list[str]) -> list[None]:
        return [None] * len(names)  # no token stands for a byte

    def __call__(self, *given: object, **more: object) -> None:
        raise PanicException("index out of range\nat line 7")

    decode = __call__


def test_a_panic_is_an_error_and_an_interrupt_stays_one() -> None:
    with pytest.raises(RuntimeError, match="out of range"), panics_as_errors():
        raise PanicException("index out of range")
    for other in (KeyboardInterrupt, ValueError):
        with pytest.raises(other), panics_as_errors():
            raise other


def test_one_while_a_tokenizer_works(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    codec = TextCodec(load_tokenizer(folder), folder, {})

    codec.tokenizer = _Panicking()  # type: ignore[assignment]
    for use in (lambda: codec.tokenize("x"), lambda: codec.decode([1]), lambda: codec.spell([1])):
        with pytest.raises(CheckpointError, match=r"fails at .*index out of range at line 7"):
            use()


def test_a_configuration_that_sends_to_another_file(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"fast_tokenizer_files": ["tokenizer.json"]}))
    load_tokenizer(folder)
    file.write_text(json.dumps(config | {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]}))
    with pytest.raises(CheckpointError, match="remove fast_tokenizer_files"):
        load_tokenizer(folder)
