"""Exceptions that offspec raises on purpose.

    OffspecError
    ├── RequestError              invalid request (exit code 2)
    │   └── ContextLengthError    prompt too long to leave room for an answer in the context
    ├── CheckpointError           invalid or unreadable files on disk
    │   ├── ModelNotFoundError    no such folder, file, or Hugging Face model id
    │   ├── HeaderError           damaged header, or one that contradicts its tensors
    │   ├── TruncatedError        file shorter than its header says
    │   ├── MissingTensorError    missing shard or tensor
    │   └── UnsupportedModelError architecture that cannot be streamed or verified as a tree
    ├── CapacityError             memory limit too small
    ├── DiskFullError             not enough disk space to write
    ├── DraftError                draft that cannot draft for this target
    ├── PlanError                 plan that is damaged, or for another model or machine
    ├── SessionError              saved conversation that is damaged, foreign, or cannot be written
    ├── StreamError               failed read while a model was streamed
    └── ClosedError               closed engine

A message is one line that names the problem and, if there is one, the fix. Any other exception is a bug in
offspec.
"""

from pathlib import Path


class OffspecError(Exception):
    """Base class of all errors that offspec raises on purpose."""

    exit_code: int = 1


class RequestError(OffspecError):
    """Invalid request: an empty prompt, an invalid parameter, or a prompt longer than the context.

    Attributes: `field`, name of the invalid parameter, or None; `code`, machine-readable reason, or None.
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
    """Checkpoint that cannot be read in the format it claims to have."""


class ModelNotFoundError(CheckpointError):
    """No folder, file or Hugging Face repository has this name."""


class HeaderError(CheckpointError):
    """A header is damaged, or gives impossible positions for its tensors."""


class TruncatedError(CheckpointError):
    """A file is shorter than its own header says."""


class MissingTensorError(CheckpointError):
    """A shard file or a tensor that the model needs is missing."""


class UnsupportedModelError(CheckpointError):
    """The architecture cannot be streamed, or cannot be verified as a tree."""


class CapacityError(OffspecError):
    """The request does not fit in the memory limit.

    Attributes: `needed` and `given`, in bytes; `needed` is the smallest sufficient memory limit.
    """

    def __init__(self, message: str, *, needed: int, given: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.given = given


class DiskFullError(OffspecError):
    """A file could not be written because the disk is full."""


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
    """Return the error for a missing package. extra: the extra of offspec that installs it."""
    return RequestError(
        f"{name} is not installed; in the folder of offspec's source run: pip install '.[{extra}]'"
    )
