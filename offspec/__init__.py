"""Run language models larger than your memory.

    engine = offspec.load("path-or-hub-id", memory="1.5GB")
    print(engine.generate("Why is the sky blue?").text)

`load` opens a model and returns an `Engine`; `SamplingParams` says how tokens are chosen. A stream
yields the classes of `offspec.events`; everything raised on purpose is an `OffspecError`, and
`offspec.errors` draws the tree of them.

Names are looked up when they are first used (PEP 562), so that importing offspec, and asking the
command line for help, does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Engine": "engine",
    "load": "loading",
    "Session": "session",
    "EngineConfig": "config",
    "SamplingParams": "config",
    "Event": "events",
    "Finished": "events",
    "LoadProgress": "events",
    "Mismatch": "events",
    "Notice": "events",
    "PassProgress": "events",
    "PassStats": "events",
    "Piece": "events",
    "Prefill": "events",
    "Result": "events",
    "TextDelta": "events",
    "TreeSeen": "events",
    "Timeline": "timeline",
    "CapacityError": "errors",
    "CheckpointError": "errors",
    "ClosedError": "errors",
    "DiskFullError": "errors",
    "DraftError": "errors",
    "HeaderError": "errors",
    "MissingTensorError": "errors",
    "ModelNotFoundError": "errors",
    "OffspecError": "errors",
    "PlanError": "errors",
    "RequestError": "errors",
    "SessionError": "errors",
    "StreamError": "errors",
    "TruncatedError": "errors",
    "UnsupportedModelError": "errors",
}

__all__ = [  # noqa: RUF022 - in the order a reader meets them
    "__version__",
    "load",
    "Engine",
    "Session",
    "EngineConfig",
    "SamplingParams",
    "Event",
    "LoadProgress",
    "Notice",
    "Prefill",
    "PassProgress",
    "TextDelta",
    "Piece",
    "TreeSeen",
    "PassStats",
    "Mismatch",
    "Result",
    "Finished",
    "Timeline",
    "OffspecError",
    "RequestError",
    "CheckpointError",
    "ModelNotFoundError",
    "HeaderError",
    "TruncatedError",
    "MissingTensorError",
    "UnsupportedModelError",
    "CapacityError",
    "DiskFullError",
    "DraftError",
    "PlanError",
    "SessionError",
    "StreamError",
    "ClosedError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offspec' has no attribute {name!r}")
    from offspec.openmp import limit_spinning

    limit_spinning()  # before what is asked for imports torch
    return getattr(import_module(f"offspec.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from offspec.config import EngineConfig, SamplingParams
    from offspec.engine import Engine
    from offspec.errors import (
        CapacityError,
        CheckpointError,
        ClosedError,
        DiskFullError,
        DraftError,
        HeaderError,
        MissingTensorError,
        ModelNotFoundError,
        OffspecError,
        PlanError,
        RequestError,
        SessionError,
        StreamError,
        TruncatedError,
        UnsupportedModelError,
    )
    from offspec.events import (
        Event,
        Finished,
        LoadProgress,
        Mismatch,
        Notice,
        PassProgress,
        PassStats,
        Piece,
        Prefill,
        Result,
        TextDelta,
        TreeSeen,
    )
    from offspec.loading import load
    from offspec.session import Session
    from offspec.timeline import Timeline
