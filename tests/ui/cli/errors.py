"""The one line in which the program tells an error."""

from typer.testing import Result


def error_line(result: Result) -> str:
    """The one line that begins with `error:`, after checking that it is alone."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
