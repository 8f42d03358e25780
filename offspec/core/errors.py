"""Every error offspec raises on purpose.

    OffspecError
    ├── RequestError              the caller asked for something that cannot be done (exit code 2)
    │   └── ContextLengthError    a prompt that leaves no room for an answer in the context
    ├── CheckpointError           what is on disk is not what it should be
    │   ├── ModelNotFoundError    no such folder, file, or hub id
    │   ├── HeaderError           a header that is damaged or lies about its tensors
    │   ├── TruncatedError        a file shorter than its header says
    │   ├── MissingTensorError    a shard or tensor that the model needs is absent
    │   └── UnsupportedModelError an architecture that cannot be streamed or verified as a tree
    ├── CapacityError             does not fit in the memory limit
    ├── DiskFullError             no room to write
    ├── DraftError                the draft cannot draft for this target
    ├── PlanError                 a plan that is damaged or does not belong here
    ├── SessionError              a saved conversation that is damaged, foreign, or cannot be written
    ├── StreamError               a read failed while a model was being streamed
    └── ClosedError               the engine was closed

A message is one line, says what is wrong, and names the fix where there is one. Anything that is not
an `OffspecError` is a bug in offspec.
"""

from pathlib import Path


class OffspecError(Exception):
    """Base of all errors that offspec raises on purpose."""

    exit_code: int = 1


class RequestError(OffspecError):
    """The request itself cannot be met: an empty prompt, a bad parameter, a prompt over the context.

    Attributes: `field`, the parameter that is wrong, or None; `code`, a word for programs, or None.
    """

    exit_code = 2
    code: str | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """The prompt leaves no room for an answer in the context."""

    code = "context_length_exceeded"


class CheckpointError(OffspecError):
    """A checkpoint could not be read as what it claims to be."""


class ModelNotFoundError(CheckpointError):
    """No folder, file or hub repository of that name."""


class HeaderError(CheckpointError):
    """A header is damaged, or describes tensors that cannot be where it says."""


class TruncatedError(CheckpointError):
    """A file is shorter than its own header says."""


class MissingTensorError(CheckpointError):
    """A shard file or a tensor that the model needs is absent."""


class UnsupportedModelError(CheckpointError):
    """The architecture cannot be streamed, or cannot be verified as a tree."""


class CapacityError(OffspecError):
    """What was asked for does not fit in the memory limit.

    Attributes: `needed` and `given`, in bytes; `needed` is the smallest budget that would do.
    """

    def __init__(self, message: str, *, needed: int, given: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.given = given


class DiskFullError(OffspecError):
    """A file could not be written because the disk has no room for it."""


class DraftError(OffspecError):
    """The draft cannot draft for this target (another vocabulary, an unknown format)."""


class PlanError(OffspecError):
    """A plan is damaged, or was made for another model or machine."""


class SessionError(OffspecError):
    """A saved conversation is damaged, foreign, or cannot be written."""


class StreamError(OffspecError):
    """A read failed while the target was streamed. Attributes: `file`, and `offset` in bytes."""

    def __init__(self, message: str, *, file: Path | str, offset: int) -> None:
        super().__init__(f"{message} ({file}, offset {offset})")
        self.file = Path(file)
        self.offset = offset


class ClosedError(OffspecError):
    """The engine was closed and cannot be used any more."""


def missing_package(name: str, extra: str) -> RequestError:
    """The error for a package that is not installed, and the extra of offspec that has it."""
    return RequestError(
        f"{name} is not installed; in the folder of offspec's source run: pip install '.[{extra}]'"
    )
