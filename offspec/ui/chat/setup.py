"""Setup of a chat: its settings, and opening an engine for them."""

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
    from offspec.chat.archive import SessionArchive
    from offspec.chat.session import Session
    from offspec.engine.engine import Engine
    from offspec_planners.plan import Plan

_WITH_VALUE = ("--session", "--system")  # a resumed conversation has its own system message


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """Checked settings of a chat from the command line.

    Args:
        config: Configuration of the engine.
        sampling: Sampling parameters that override the model's.
        system: System message, or None.
        plan: Plan file to use, or None.
        resume: Conversation to resume: None for a new one, "" for the latest with this model, else its name.
        overrides: Names of sampling parameters that replace the saved ones of a resumed conversation.
        trees: Whether to collect verified trees for display.
        command: Words of the command that started the chat, without those that name a conversation.
        notify: Whether to announce the end of a long answer with a bell and a desktop notification.
    """

    config: EngineConfig
    sampling: SamplingOverrides
    system: str | None = None
    plan: Path | None = None
    resume: str | None = None
    overrides: frozenset[str] = frozenset()
    trees: bool = True
    command: tuple[str, ...] = ("offspec", "chat")
    notify: bool = True

    def merge_params(self, saved: SamplingParams) -> SamplingParams:
        """Return the saved parameters of a resumed conversation with `overrides` applied."""
        return replace(saved, **{name: self.sampling.values[name] for name in self.overrides})

    def session_to_resume(self, archive: "SessionArchive") -> Path | None:
        """Return the file of the conversation to resume, or None for a new one.

        Raises SessionError if there are only unreadable files, since one may be the wanted conversation.
        """
        if self.resume:
            return archive.find(self.resume)
        latest = None if self.resume is None else archive.latest(self.config.model)
        if self.resume is not None and latest is None and archive.damaged:
            raise SessionError(
                f"no conversation with {self.config.model} can be resumed: {archive.unreadable_summary()}; "
                "omit --resume to begin a new one"
            )
        return None if latest is None else latest.file


class ChatEngine(Protocol):
    """Interface of an engine, as far as a chat uses it."""

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


# Arguments: configuration, plan file, and listener. The listener receives events of the load and, later, of
# every pass from the thread that answers.
Opener = Callable[[EngineConfig, Path | None, Callable[[Event], None]], ChatEngine]


def open_engine(config: EngineConfig, plan: Path | None, notify: Callable[[Event], None]) -> "Engine":
    """Open the real engine. Raises OffspecError.

    The first call imports torch, which takes seconds: do not call it in a thread that must stay responsive.
    """
    notify(LoadProgress("starting", 0, 0, "steps"))
    gc.unfreeze()
    # Objects frozen at exit are not freed, and Triton reports them as leaked, even if loading fails.
    atexit.register(gc.unfreeze)
    with _gc_disabled():
        preload_torch()
        from offspec.engine.load import load
    opened = load(config, plan=plan, notify=notify)
    gc.collect()
    gc.freeze()
    return opened


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection during imports, and exclude the imported objects from later collections.

    Scanning the objects that torch and transformers create on import blocks all threads for about 0.17 s each
    time, and none of them ever becomes garbage.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


_LIBRARY = "libtorch_cpu.so"  # half a gigabyte, with thousands of constructors


def preload_torch() -> None:
    """Open torch's library without holding the interpreter lock.

    Importing torch holds the lock for 200 ms while the system opens the library, and no key is processed
    meanwhile. A call through ctypes releases the lock, and the import then finds the library open. If that
    fails, torch opens the library itself.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    file = Path(spec.submodule_search_locations[0]) / "lib" / _LIBRARY
    with suppress(OSError, AttributeError):
        open_library = ctypes.CDLL(None).dlopen
        open_library.restype, open_library.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        open_library(os.fsencode(file), os.RTLD_NOW | os.RTLD_GLOBAL)


def restart_command(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that started this chat, without options that name a conversation.

    Args:
        argv: Program and arguments as in `sys.argv`; the first argument is "chat".
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
