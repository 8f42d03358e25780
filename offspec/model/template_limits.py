"""Output and time limits for chat templates, which are untrusted programs.

jinja's sandbox protects the machine, but not its memory and time: `"x" * 10**10`, `tojson(indent=10**8)` and
nested loops are allowed. Here every operation with a potentially large result is checked before it runs, and
the template's output and time are checked while it runs.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache, wraps
from inspect import unwrap
from itertools import chain
from types import FrameType, FunctionType
from typing import Any

from jinja2 import Template
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import Concat
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from offspec.core.monkeypatch import Replacement, monkeypatched

_ROOM = 2**20  # characters in addition to those of the messages
_GROWTH = 8  # times that a template may repeat the characters of the messages
_SECONDS = 5.0  # of the thread's processor time
_WIDEST = 2**12  # of padding, indentation, and parts of a list
_BITS = 2**12  # of a whole number
_WIDTH = re.compile(r"\d{4,}|\*|:[^{}]*\{")  # in a format: a large width, or one given as an argument
_PADDING = {
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "indent",
    "tojson",
    "slice",
    "batch",
    "generate_lorem_ipsum",
}
_TEMPLATE = "<template>"

_most: ContextVar[int] = ContextVar("most", default=0)  # characters; 0: limits are not enforced


class TemplateLimitError(Exception):
    """A template exceeds a limit."""


@contextmanager
def enforce_template_limits(message_chars: int) -> Iterator[None]:
    """Enforce the limits on templates that this thread renders in the block.

    Args:
        message_chars: Characters of the messages and variables given to the template.

    Raises:
        TemplateLimitError: A template exceeds a limit.
    """
    from transformers.utils import chat_template_utils

    most = _ROOM + _GROWTH * message_chars
    with monkeypatched([Replacement(chat_template_utils, "_compile_jinja_template", _either)]):
        token, before = _most.set(most), sys.gettrace()
        sys.settrace(_Watch(most))
        try:
            yield
        finally:
            sys.settrace(before)
            _most.reset(token)


class _Watch:
    """Trace function that checks the time at each line and call of a template, and the text it yields."""

    def __init__(self, most: int) -> None:
        self._left, self._until = most, time.thread_time() + _SECONDS

    def __call__(self, frame: FrameType, event: str, given: object) -> "_Watch | None":
        if time.thread_time() > self._until:
            raise TemplateLimitError(f"it takes longer than {_SECONDS:g} s")
        if frame.f_code.co_filename != _TEMPLATE:
            return None  # trace calls of other code, but not its lines
        if event == "return" and isinstance(given, str):
            self._left -= len(given)
            if self._left < 0:
                raise TemplateLimitError("it writes far more text than the messages have")
        return self


def _either(original: Callable[[str], Template]) -> Callable[[str], Template]:
    """Return a compile function that uses the environment below while this thread enforces limits."""
    return lambda template: (_compile if _most.get() else original)(template)


@lru_cache
def _compile(template: str) -> Template:
    """Compile a template as transformers does, for the environment below."""
    from transformers.utils import chat_template_utils

    compiles = unwrap(chat_template_utils._cached_compile_jinja_template)
    names = vars(chat_template_utils) | {"ImmutableSandboxedEnvironment": _Environment}
    compiled: Template = FunctionType(compiles.__code__, names)(template)
    return compiled


class _Joining(CodeGenerator):
    """Code generator in which `a ~ b` calls the environment, as other operators do."""

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox that also rejects operations whose text, list or number would be far too large."""

    concat = staticmethod(lambda parts: _concat(parts))
    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _Joining

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.filters = _Limited(self.filters)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    _allow(len(many) * times)
            _allow_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _allow_bits(_bits(left) * (abs(right) if isinstance(right, int) else 1))
        elif operator == "+":
            _allow(sum(len(side) for side in (left, right) if isinstance(side, str | list | tuple)))
        elif isinstance(left, str):
            _allow_format(left)
        return super().call_binop(context, operator, left, right)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """Concatenate the operands of `~`."""
        _allow(sum(len(part) for part in parts if isinstance(part, str)))
        return (markup_join if self.autoescape else str_join)(parts)

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        name = getattr(function, "__name__", "")
        method = getattr(function, "__wrapped__", function)  # jinja wraps str.format
        owner = getattr(method, "__self__", None)
        _check_call(name, (owner, *args) if isinstance(owner, str) else args, named)
        result = super().call(context, function, *args, **named)
        return _allowed(result)


def _concat(parts: Iterable[str]) -> str:
    """Concatenate the output of a template, macro or block."""
    parts = list(parts)
    _allow(sum(map(len, parts)))
    return "".join(parts)


class _Limited(dict[str, Callable[..., Any]]):
    """Filters that check their arguments and results."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _checking(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the checking filter, or `default`; jinja calls this to compute constants at compile time."""
        function = super().get(name)
        return default if function is None else _checking(name, function)


@cache
def _checking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        _check_call(name, args, named)
        return _allowed(function(*args, **named))

    return checked


def _check_call(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Reject a call whose result would be too large. `args` of a string method begin with the string."""
    if not _most.get():
        return
    texts = [value for value in args if isinstance(value, str)]
    if name in _PADDING:
        widths = args[1:] if name == "tojson" else args  # its first argument is any value, such as a number
        for value in chain(widths, named.values()):
            if isinstance(value, int) and abs(value) > _WIDEST:
                raise TemplateLimitError(f"it calls {name} with the width {value!s:.20}")
    if name == "indent" and len(texts) > 1:
        _allow((texts[0].count("\n") + 1) * len(texts[1]))
    elif name == "tojson" and any(len(text) > _WIDEST for text in named.values() if isinstance(text, str)):
        raise TemplateLimitError("it calls tojson with a very long indentation")
    elif name in ("format", "format_map") and texts:
        _allow_format(texts[0])
    elif name == "replace" and len(texts) > 2:
        _allow(len(texts[0]) + (texts[0].count(texts[1]) + 1) * len(texts[2]))
    elif name == "join":
        lengths = [len(value) for value in args if isinstance(value, list | tuple | dict)]
        _allow(max(map(len, texts), default=0) * max(lengths, default=0))


def _allow(size: int) -> None:
    if (most := _most.get()) and size > most:
        raise TemplateLimitError("it writes far more text than the messages have")


def _allowed(result: Any) -> Any:
    if isinstance(result, str | list | tuple | dict):
        _allow(len(result))
    return result


def _allow_format(text: str) -> None:
    if _most.get() and _WIDTH.search(text):
        raise TemplateLimitError("it formats a text to more than 999 columns")


def _allow_bits(bits: int) -> None:
    if _most.get() and bits > _BITS:
        raise TemplateLimitError("it computes with numbers that are far too large")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
