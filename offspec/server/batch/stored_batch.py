"""A batch of a client, as it is kept and as the client sees it."""

import json
import time
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from offspec.server.batch.line_processor import parse_usage
from offspec.server.openai_common import usage_body
from offspec.server.protocol import Usage

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_TIMES = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled")


class BatchError(Struct):
    """Why a batch has failed. line: the number of the line that is wrong, where it is one."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(Struct):
    """A batch.

    Args:
        id: Its id.
        order: Of its making, in nanoseconds since 1970.
        model: What its lines ask that name no model.
        endpoint: Path of the API that its lines are for.
        input: Id of the file with its lines.
        output: Id of the file with the answers, which clients see in the end.
        errors: Of the one with what could not be answered.
        metadata: The client's own.
        kept_s: Seconds for which the two files are kept; None: as long as others.
        times: When it came to be what it was, by status, in seconds since 1970.
        troubles: Why it has failed.
        total, completed, failed: Lines of it: all, those with an answer, those with an error.
        usage: Tokens of its answers, when it has ended.
    """

    id: str
    order: int
    model: str
    endpoint: str
    input: str
    output: str
    errors: str
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    kept_s: int | None = None
    times: dict[str, int] = field(default_factory=dict)
    troubles: list[BatchError] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    usage: dict[str, Any] | None = None

    @property
    def is_unfinished(self) -> bool:
        """There is still something to do for it."""
        return self.status in UNFINISHED

    @property
    def created_at(self) -> int:
        """Seconds since 1970."""
        return self.order // 10**9

    @property
    def ended_at(self) -> int:
        """Seconds since 1970; of one that has not ended, when it was made."""
        return self.times.get(self.status, self.created_at)

    def set_status(self, status: Status) -> None:
        """Enter a status now."""
        self.status = status
        self.times[status] = int(time.time())

    def to_openai(self) -> dict[str, Any]:
        """The batch as OpenAI's object."""
        errors = {"object": "list", "data": self.troubles} if self.troubles else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output if self.has_output else None,
            "error_file_id": self.errors if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": None,  # it goes on for as long as it takes
            "expired_at": None,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage,
            "metadata": self.metadata,
        }


def count_results(path: Path) -> tuple[int, dict[str, Any]]:
    """Results in a file, and the tokens of their answers in the shape of a batch's usage."""
    usages = list[Usage]()
    if path.exists():
        with path.open("rb") as file:
            usages = [parse_usage(json.loads(text)["response"]["body"]) for text in file]
    return len(usages), usage_body(sum(usages, Usage()))
