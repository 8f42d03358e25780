"""Tokenizers: bytes of tokens, Rust panics, and chat templates that exceed memory or time limits."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from offspec.core.errors import CheckpointError, RequestError
from offspec.core.rust_panics import panics_as_errors
from offspec.model import template_limits
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec.model.vocabulary import token_bytes
from tests.support.tokenizers import byte_fallback, byte_level, saved

TEXTS = ["the cat sat on the mat", "日本語の文字", "🎉 👩‍🚀 naïve\ncafé", "\ufffd!", " two  spaces "]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_the_bytes_of_the_text(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(saved(make(), tmp_path))
    parts = set[bytes]()
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = [token_bytes(tokenizer, token) for token in ids]
        front = b" " if make is byte_fallback else b""  # added before every text
        assert b"".join(found) == front + text.encode()
        parts.update(found)
    assert any(not _is_text(part) for part in parts)  # some tokens are parts of characters


def test_special_tokens_and_ids_without_a_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(byte_level(), tmp_path))
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("</s>")) == b"</s>"
    assert token_bytes(tokenizer, len(tokenizer) + 5) == b""


def _is_text(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True


class PanicException(BaseException):
    """Exception like pyo3's."""


class _Panicking:
    def convert_tokens_to_ids(self, names: list[str]) -> list[None]:
        return [None] * len(names)  # no byte tokens

    def __call__(self, *given: object, **more: object) -> None:
        raise PanicException("index out of range\nat line 7")

    decode = __call__


def test_a_panic_is_an_error_and_an_interrupt_stays_one() -> None:
    with pytest.raises(RuntimeError, match="out of range"), panics_as_errors():
        raise PanicException("index out of range")
    for other in (KeyboardInterrupt, ValueError):
        with pytest.raises(other), panics_as_errors():
            raise other


def test_a_panic_during_tokenization(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    codec = TextCodec(load_tokenizer(folder), folder, {})

    codec.tokenizer = _Panicking()  # type: ignore[assignment]
    for use, action in (
        (lambda: codec.tokenize("x"), "encode a text"),
        (lambda: codec.decode([1]), "decode tokens"),
        (lambda: codec.decode_with_special([1]), "decode tokens"),
    ):
        with pytest.raises(CheckpointError, match=rf"cannot {action} .*index out of range at line 7"):
            use()


def test_a_configuration_that_refers_to_another_file(tmp_path: Path) -> None:
    folder = saved(byte_level(), tmp_path)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"fast_tokenizer_files": ["tokenizer.json"]}))
    load_tokenizer(folder)
    file.write_text(json.dumps(config | {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]}))
    with pytest.raises(CheckpointError, match="remove fast_tokenizer_files"):
        load_tokenizer(folder)


SAY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LARGE = [
    "{{ 'x' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 10**(10**10) }}",
    "{{ messages | tojson(indent=10**8) }}",
    "{{ messages | tojson(false, 10**8) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x\\ny' | indent(10**10) }}",
    "{{ ('\\n' * 10**6) | indent('y' * 10**6, blank=true) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ '{a:{b}}'.format(a=1, b=10**9) }}",
    "{{ [1, 2] | slice(10**9) | list }}",
    "{{ lipsum(n=10**8) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "{{ ('y' * 10**6).join(['a'] * 10**6) }}",
    "{{ (['a'] * 10**6) | join('y' * 10**6) }}",
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}",
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set x.s %}{{ x.s }}{{ x.s }}{% endset %}{% endfor %}",
    "{% set x = namespace(n=3) %}{% for i in range(60) %}{% set x.n = x.n * x.n %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% macro m(n) %}{{ 'x' * 1000 }}{% endmacro %}{% for i in range(99999) %}{{ m(1) }}{% endfor %}",
]
LONG = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = saved(byte_level(), tmp_path_factory.mktemp("model"))
    return TextCodec(load_tokenizer(folder), folder, {})


def render(codec: TextCodec, template: str, content: str = "Why?") -> str:
    codec.tokenizer.chat_template = template
    return codec.render([{"role": "user", "content": content}])


@pytest.mark.parametrize("template", LARGE)
def test_a_template_with_excessive_output_is_refused(codec: TextCodec, template: str) -> None:
    with pytest.raises(RequestError, match="the model's chat template refuses the prompt: it "):
        render(codec, template + SAY)


@pytest.mark.parametrize("template", LONG)
def test_an_endless_template_is_refused(
    codec: TextCodec, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "_SECONDS", 0.2)
    with pytest.raises(RequestError, match="refuses the prompt: it takes longer than"):
        render(codec, template + SAY)


def test_ordinary_templates_are_not_affected(codec: TextCodec) -> None:
    long = "word " * 500_000
    assert render(codec, SAY, long) == f"user: {long}\n"
    template = "{{ '%5.2f' % 1.5 }} {{ '{:>4}'.format(7) }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] + [2] }}"
    template += "{{ {'a': [1]} | tojson(indent=4) }} {{ 'a' ~ 1 ~ 'b' }} {{ 'xay'.replace('a', 'b') }}"
    template += " {{ 30000 | tojson }}"
    shown = ' 1.50    7 1024 ababab [1, 2]{\n    "a": [\n        1\n    ]\n} a1b xby 30000'
    assert render(codec, template + "{{ messages[0].content }}") == shown + "Why?"


def test_limits_end_after_rendering(codec: TextCodec) -> None:
    before = sys.gettrace()
    render(codec, SAY)
    assert sys.gettrace() is before
