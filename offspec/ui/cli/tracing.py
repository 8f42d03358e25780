"""`--trace FILE`: a timeline that is written however the work ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from offspec import __version__
from offspec.core.config import EngineConfig, format_bytes
from offspec.core.errors import OffspecError
from offspec.core.trace import Timeline


@contextmanager
def traced(file: Path | None, config: EngineConfig, say: Callable[[str], None]) -> Iterator[Timeline | None]:
    """A timeline to record into, written to `file` when the block ends; None where there is no file.

    After an error or Ctrl-C in the block what was recorded by then is written, and that error goes on:
    should the file fail as well, that is only said. Where nothing was recorded no file appears.
    """
    if file is None:
        yield None
        return
    timeline = Timeline(on=True)
    try:
        yield timeline
    except BaseException:
        if timeline.kept:
            try:
                say(_write(timeline, file, config))
            except OffspecError as error:
                say(f"the timeline is lost: {error}")
        raise
    say(_write(timeline, file, config))


def _write(timeline: Timeline, file: Path, config: EngineConfig) -> str:
    """Write the file; a line for the user about it. Raises DiskFullError, RequestError."""
    settings = {name: value for name, value in asdict(config).items() if value is not None}
    timeline.write(file, {"offspec": __version__, **settings})
    size = format_bytes(file.stat().st_size)
    missing = f", without the last {timeline.dropped} events" if timeline.dropped else ""
    return f"timeline written to {file}, {size}{missing}; open it at https://ui.perfetto.dev"
