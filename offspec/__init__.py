"""Run language models larger than your memory.

    engine = offspec.load("path-or-hub-id", memory="1.5GB")
    print(engine.generate("Why is the sky blue?").text)

`load` opens a model and returns an `Engine`; `SamplingParams` controls how tokens are chosen. A stream
yields the classes of `offspec.core.events`. Every intended error is an `OffspecError`; see
`offspec.core.errors` for the hierarchy.

Names are imported on first use (PEP 562), so that importing offspec, and the command line's `--help`, do
not load torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # not from typing: its import would delay the Ctrl-C handling of __main__

__version__ = "0.1.0"

_HOME = {
    "Engine": ".engine.engine",
    "load": ".engine.load",
    "Answer": ".engine.answer",
    "Session": ".chat.session",
    "Message": ".chat.message",
    "Plan": "offspec_planners.plan",
    "EngineConfig": ".core.config",
    "SamplingParams": ".core.config",
    "Constraint": ".core.constraint",
    "Event": ".core.events",
    "Finished": ".core.events",
    "LoadProgress": ".core.events",
    "Mismatch": ".core.events",
    "ModelInfo": ".core.model_info",
    "Notice": ".core.events",
    "PassProgress": ".core.events",
    "PassStats": ".core.events",
    "Piece": ".core.events",
    "Prefill": ".core.events",
    "PromptLogprobs": ".core.events",
    "Result": ".core.events",
    "TextDelta": ".core.events",
    "TokenLogprobs": ".core.events",
    "TreeSeen": ".core.events",
    "Timeline": ".core.trace",
    "CapacityError": ".core.errors",
    "CheckpointError": ".core.errors",
    "ClosedError": ".core.errors",
    "ContextLengthError": ".core.errors",
    "DiskFullError": ".core.errors",
    "DraftError": ".core.errors",
    "HeaderError": ".core.errors",
    "MissingTensorError": ".core.errors",
    "ModelNotFoundError": ".core.errors",
    "OffspecError": ".core.errors",
    "PlanError": ".core.errors",
    "RequestError": ".core.errors",
    "SessionError": ".core.errors",
    "StreamError": ".core.errors",
    "TruncatedError": ".core.errors",
    "UnsupportedModelError": ".core.errors",
}

__all__ = [  # noqa: RUF022 - in the order of the documentation
    "__version__",
    "load",
    "Engine",
    "Answer",
    "Session",
    "Message",
    "EngineConfig",
    "SamplingParams",
    "Constraint",
    "Event",
    "LoadProgress",
    "Notice",
    "Prefill",
    "PassProgress",
    "PromptLogprobs",
    "TextDelta",
    "Piece",
    "TokenLogprobs",
    "TreeSeen",
    "PassStats",
    "Mismatch",
    "Result",
    "Finished",
    "Plan",
    "ModelInfo",
    "Timeline",
    "OffspecError",
    "RequestError",
    "ContextLengthError",
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


def __getattr__(name: str) -> "Any":
    if name not in _HOME:
        raise AttributeError(f"module 'offspec' has no attribute {name!r}")
    from offspec.core.openmp import limit_spinning

    limit_spinning()  # before torch is imported
    return getattr(import_module(_HOME[name], "offspec"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from typing import Any

    from offspec.chat.message import Message
    from offspec.chat.session import Session
    from offspec.core.config import EngineConfig, SamplingParams
    from offspec.core.constraint import Constraint
    from offspec.core.errors import (
        CapacityError,
        CheckpointError,
        ClosedError,
        ContextLengthError,
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
    from offspec.core.events import (
        Event,
        Finished,
        LoadProgress,
        Mismatch,
        Notice,
        PassProgress,
        PassStats,
        Piece,
        Prefill,
        PromptLogprobs,
        Result,
        TextDelta,
        TokenLogprobs,
        TreeSeen,
    )
    from offspec.core.model_info import ModelInfo
    from offspec.core.trace import Timeline
    from offspec.engine.answer import Answer
    from offspec.engine.engine import Engine
    from offspec.engine.load import load
    from offspec_planners.plan import Plan
