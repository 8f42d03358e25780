"""Description of a client's batch, as stored and as returned by the Batch API."""

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
    """Reason why a batch failed. line: number of the invalid line, from 1; None for other reasons."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(Struct):
    """Batch.

    Args:
        id: Id of the batch.
        order: Creation time, in nanoseconds since 1970.
        model: Model of lines that do not name one.
        endpoint: Path of the API for all lines.
        input: Id of the file with the lines.
        output: Id of the file with the answers, which clients can read when the batch has ended.
        errors: Id of the file with the lines that failed, which clients can read when the batch has ended.
        status: Status in OpenAI's terms.
        metadata: Metadata set by the client.
        kept_s: Seconds for which the two result files are kept. None: the default of all files.
        times: Time at which the batch entered each status, in seconds since 1970.
        troubles: Reasons why the batch failed.
        total: Number of lines.
        completed: Number of lines with an answer.
        failed: Number of lines with an error.
        has_output: Whether the file with the answers exists, once the batch has ended.
        has_errors: Whether the file with the failed lines exists, once the batch has ended.
        usage: Token counts of the answers, once the batch has ended.
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
        """Whether the batch has not ended yet."""
        return self.status in UNFINISHED

    @property
    def created_at(self) -> int:
        """Creation time, in seconds since 1970."""
        return self.order // 10**9

    @property
    def ended_at(self) -> int:
        """Time of the current status, in seconds since 1970; the creation time if none was recorded."""
        return self.times.get(self.status, self.created_at)

    def set_status(self, status: Status) -> None:
        """Set the status and record the current time for it."""
        self.status = status
        self.times[status] = int(time.time())

    def to_openai(self) -> dict[str, Any]:
        """Return the batch as an object of OpenAI's API."""
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
            "expires_at": None,  # batches have no time limit
            "expired_at": None,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage,
            "metadata": self.metadata,
        }


def count_results(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the number of results in a file, and their token counts in the format of a batch's usage."""
    usages = list[Usage]()
    if path.exists():
        with path.open("rb") as file:
            usages = [parse_usage(json.loads(text)["response"]["body"]) for text in file]
    return len(usages), usage_body(sum(usages, Usage()))
