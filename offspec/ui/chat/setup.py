"""What a chat begins with: settings, and a way to open an engine for them."""

import atexit
import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import SessionError
from offspec.core.events import Event, LoadProgress
from offspec.core.sampling_defaults import SamplingOverrides

if TYPE_CHECKING:
    from offspec.chat.archive import Archive
    from offspec.chat.session import Session
    from offspec.engine.engine import Engine
    from offspec_planners.plan import Plan

_WITH_VALUE = ("--session", "--system")  # the conversation has its own system message by then


@dataclass(frozen=True, slots=True)
class Setup:
    """What was asked for on the command line, complete and checked, before any model is opened.

    sampling: parameters that options set over those of the model. plan: a plan file to follow. resume: None
    begins a new conversation, "" takes up the latest one held with this model, and anything else names one.
    It goes on with the parameters it had, but for those whose names are in `given`. trees: whether verified
    trees are gathered, to be looked at. command: the words that began the chat, but for those that name a
    conversation. notify: whether the end of a long answer is announced with a bell and a desktop notice.
    """

    config: EngineConfig
    sampling: SamplingOverrides
    system: str | None = None
    plan: Path | None = None
    resume: str | None = None
    given: frozenset[str] = frozenset()
    trees: bool = True
    command: tuple[str, ...] = ("offspec", "chat")
    notify: bool = True

    def params_over(self, held: SamplingParams) -> SamplingParams:
        """The parameters of a conversation that is resumed, in which those that were given are others."""
        return replace(held, **{name: self.sampling.values[name] for name in self.given})

    def resumed(self, archive: "Archive") -> Path | None:
        """The file of the conversation to take up, None for a new one. Raises SessionError.

        What cannot be read may be that conversation, so a new one is not begun in silence.
        """
        if self.resume:
            return archive.find(self.resume)
        latest = None if self.resume is None else archive.latest(self.config.model)
        if self.resume is not None and latest is None and archive.damaged:
            raise SessionError(
                f"no conversation with {self.config.model} can be resumed: {archive.unread()}; leave out "
                "--resume to begin a new one"
            )
        return None if latest is None else latest.file


class ChatEngine(Protocol):
    """The part of an engine that a chat uses."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def context(self) -> int: ...

    @property
    def budget(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def draft(self) -> str: ...

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def sampling_defaults(self) -> SamplingParams: ...

    def use(self, draft: str) -> None: ...

    @property
    def plan(self) -> "Plan | None": ...

    @property
    def placement(self) -> dict[str, Any]: ...

    def chat(self, *, system: str | None = None, params: SamplingParams | None = None) -> "Session": ...

    def close(self) -> None: ...


# Takes the settings, a plan file to follow, and a listener; the listener hears of the load now and, from the
# thread that answers, of every pass later.
Opener = Callable[[EngineConfig, Path | None, Callable[[Event], None]], ChatEngine]


def open_engine(config: EngineConfig, plan: Path | None, notify: Callable[[Event], None]) -> "Engine":
    """Open the real engine. Raises OffspecError.

    The first call imports torch, which takes seconds: call it where nothing waits for it.
    """
    notify(LoadProgress("starting", 0, 0, "steps"))
    gc.unfreeze()
    # What is frozen at the end is not freed, and Triton prints that it leaked, also where loading fails.
    atexit.register(gc.unfreeze)
    with _collector_at_rest():
        preload_torch()
        from offspec.engine.load import load
    opened = load(config, plan=plan, notify=notify)
    gc.collect()
    gc.freeze()
    return opened


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Import without collections, and leave what was imported out of later ones.

    Going through all that torch and transformers make when they are imported holds every thread up for a
    sixth of a second, now and then, and none of it is ever garbage.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


_LIBRARY = "libtorch_cpu.so"  # half a gigabyte, with thousands of constructors to run


def preload_torch() -> None:
    """Importing torch holds the interpreter while the system opens this: 200 ms in which no key is heard.

    A call through ctypes lets the interpreter go, and finds the library open the second time. Where anything
    is otherwise here, torch does it by itself, as ever.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    file = Path(spec.submodule_search_locations[0]) / "lib" / _LIBRARY
    with suppress(OSError, AttributeError):
        open_library = ctypes.CDLL(None).dlopen
        open_library.restype, open_library.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        open_library(os.fsencode(file), os.RTLD_NOW | os.RTLD_GLOBAL)


def command_words(argv: Sequence[str]) -> tuple[str, ...]:
    """The command that began this chat, without options that name a conversation.

    Args:
        argv: As in `sys.argv`: the program and its words, the first of which is "chat".
    """
    words, rest = ["offspec"], iter(argv[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                next(rest, None)
        elif word != "--resume":
            words.append(word)
    return tuple(words)
