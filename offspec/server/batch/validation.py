"""Whether a file can be a batch of OpenAI's API at all."""

from pathlib import Path

from offspec.core.errors import RequestError
from offspec.server.batch.lines import Line, read_lines
from offspec.server.batch.stored_batch import Trouble

_MOST_TROUBLES = 100


def validate(path: Path, endpoint: str, most_lines: int) -> tuple[int, list[Trouble]]:
    """How many lines a file has, and what is wrong with them that no result of theirs could tell.

    What is wrong with a request alone is an error of its line, once it is its turn.
    """
    total, troubles = 0, list[Trouble]()
    try:
        for line in read_lines(path, "the file"):
            total += 1
            if total > most_lines:
                troubles.append(Trouble("too_many_lines", f"the file has more than {most_lines} lines"))
                break
            if (trouble := _trouble(line, endpoint)) is not None:
                troubles.append(trouble)
            if len(troubles) == _MOST_TROUBLES:
                break
    except RequestError as error:
        troubles.append(Trouble("duplicate_custom_id", str(error)))
    if not total:
        troubles.append(Trouble("empty_file", "the file has no lines"))
    return total, troubles


def _trouble(line: Line, endpoint: str) -> Trouble | None:
    if line.fault is not None and not line.url:
        return Trouble(line.fault.code or "invalid_line", line.fault.message, line.number, line.fault.field)
    if line.plain:
        message = "the line must have custom_id, method, url and body"
        return Trouble("invalid_line", message, line.number)
    if line.url != endpoint:
        message = f"url: it must be the endpoint of the batch, {endpoint}, not {line.url}"
        return Trouble("invalid_url", message, line.number, "url")
    return None
