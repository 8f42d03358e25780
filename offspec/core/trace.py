"""Timeline of a run in the trace-event format, which https://ui.perfetto.dev opens.

"Trace Event Format", Google, 2016: complete events ("X") for spans, counter events ("C"), and metadata ("M")
that names and orders the tracks.

Work is recorded as spans on named tracks ("read 0", "copy", "compute", "draft", …). A disabled timeline costs
a call and a comparison for each span, cheap enough to keep the spans in the decoding code.
"""

import gzip
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from offspec.core.errors import RequestError
from offspec.core.files import as_disk_full_error, atomic_file, probe_writable

Arg = int | float | str

Record = tuple[str | None, str, int, int, str]
"""Track (None: a counter), name, start and end in nanoseconds, and arguments as the text of a JSON object."""

_PROCESS = 1  # not used for a track: Perfetto would show it as the process's main thread
_FIRST_TRACK = 2

# Order of the tracks from top to bottom, from the whole to its parts. Other tracks follow by name.
_ORDER = ("engine", "load", "prefill", "draft", "verify", "compute", "copy", "read")

EVENTS = 200_000  # about 60 MB at most; a pass records one span per layer and a few for each read


class Span:
    """Context that `Timeline.span` returns. This class records nothing; disabled timelines share one."""

    __slots__ = ()

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def note(self, **args: Arg) -> None:
        """Add arguments that are only known inside the span."""


class _Recorded(Span):
    """Open span, recorded when it ends, also if it ends with an exception."""

    __slots__ = ("_args", "_began", "_name", "_timeline", "_track")

    def __init__(self, timeline: "Timeline", track: str, name: str, args: dict[str, Arg]) -> None:
        self._timeline, self._track, self._name, self._args = timeline, track, name, args
        self._began = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.perf_counter_ns()
        if kind is not None:
            self._args["error"] = kind.__name__
        self._timeline._record(self._track, self._name, self._began, ended, self._args)

    def note(self, **args: Arg) -> None:
        self._args.update(args)


_NOTHING = Span()


class Timeline:
    """Spans and counters of one run, kept in memory until `write`. Any thread may record at any time.

    Args:
        on: Whether to record. Default False, which makes every call nearly free.
        limit: Maximum number of events to keep. Later events are dropped, and the file gives their number.
    """

    __slots__ = ("_began", "_counting", "_events", "_limit", "_names", "dropped", "on")

    def __init__(self, on: bool = False, *, limit: int = EVENTS) -> None:
        self.on = on
        self.dropped = 0
        self._limit = limit
        # Appending to a list needs no lock. A span may end in a finalizer, which can interrupt its thread
        # anywhere and would deadlock on a lock that the thread holds.
        self._events: list[Record] = []
        self._names: dict[str, str] = {}
        self._counting = threading.RLock()
        self._began = time.perf_counter_ns()

    @property
    def kept(self) -> int:
        """Number of events that `write` would write now."""
        return len(self._events)

    def span(self, track: str, name: str, /, **args: Arg) -> Span:
        """Return a context whose duration becomes a complete event.

        Args:
            track: Name of the track. One thread at a time uses a track; overlapping spans of two threads are
                drawn on a second line.
            name: Name of the event.
            args: Arguments shown with the event.
        """
        if not self.on:
            return _NOTHING
        return _Recorded(self, track, name, args)

    def counter(self, name: str, value: float) -> None:
        """Record the current value of a quantity, such as bytes read; drawn as a curve."""
        if self.on:
            now = time.perf_counter_ns()
            self._record(None, name, now, now, {"value": value})

    def _record(self, track: str | None, name: str, began: int, ended: int, args: dict[str, Arg]) -> None:
        if len(self._events) >= self._limit:
            with self._counting:
                self.dropped += 1
            return
        name = self._names.setdefault(name, name)  # one copy of each name, not one for each span
        self._events.append((track, name, began - self._began, ended - self._began, encode(args)))

    def write(self, path: Path, about: Mapping[str, Arg] | None = None) -> None:
        """Write the events recorded so far as JSON, atomically.

        Args:
            path: File to write, gzipped if its name ends in .gz.
            about: Metadata of the run, none by default.

        Raises:
            DiskFullError: The disk is full.
            RequestError: The file cannot be written.
        """
        path = Path(os.path.realpath(path))
        with _as_request_errors(path), atomic_file(path) as fd, open(fd, "wb", closefd=False) as plain:
            packed = gzip.GzipFile("", "wb", 6, plain) if path.name.endswith(".gz") else nullcontext(plain)
            with packed as out:
                for line in lines(self._events[:], self.dropped, about or {}):
                    out.write(line.encode("ascii"))


OFF = Timeline()
"""Disabled timeline, the default."""


def check_writable(path: Path) -> None:
    """Check whether `Timeline.write` could write to a path. Raises the errors of `write`."""
    path = Path(os.path.realpath(path))
    with _as_request_errors(path):
        probe_writable(path)


@contextmanager
def _as_request_errors(path: Path) -> Iterator[None]:
    """Turn file system errors in the block into errors for the user. Refuses anything but a regular file."""
    try:
        if not path.parent.is_dir():
            raise RequestError(
                f"the timeline's folder {path.parent} does not exist; create it, or choose another"
            )
        if path.exists() and not path.is_file():  # renaming over a device such as /dev/null would destroy it
            kind = "a folder" if path.is_dir() else "not an ordinary file"
            raise RequestError(f"cannot write the timeline to {path}: it is {kind}; name a file")
        with as_disk_full_error(path):
            yield
    except OSError as error:
        raise RequestError(
            f"cannot write the timeline to {path}: {error.strerror}; choose a file in a folder that you can "
            "write to"
        ) from error


def encode(args: Mapping[str, Arg]) -> str:
    """Serialize arguments as a JSON object, with infinities and NaN as strings; "" without arguments."""
    if not args:
        return ""
    try:
        return json.dumps(args, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        finite = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in args.items()
        }
        return json.dumps(finite, allow_nan=False, separators=(",", ":"), default=str)


def lines(events: Sequence[Record], dropped: int, about: Mapping[str, Arg]) -> Iterator[str]:
    """Yield the text of the file, one event per line. dropped: number of events that were not kept."""
    other = {**about, "events": len(events), "dropped_events": dropped}
    yield f'{{"displayTimeUnit":"ms","otherData":{encode(other)},"traceEvents":[\n'
    yield _metadata("process_name", 0, name="offspec")
    if dropped:
        yield ",\n" + _metadata("process_labels", 0, labels=f"{dropped} later events are missing")
    thread = _FIRST_TRACK
    for track, indices in sorted(_by_track(events).items(), key=lambda item: _rank(item[0])):
        for number, lane in enumerate(_lanes(events, indices), start=1):
            name = track if number == 1 else f"{track} ({number})"
            yield ",\n" + _metadata("thread_name", thread, name=name)
            yield ",\n" + _metadata("thread_sort_index", thread, sort_index=thread)
            for index in lane:
                yield ",\n" + _span(events[index], thread)
            thread += 1
    for event in events:
        if event[0] is None:
            yield ",\n" + _counter(event)
    yield "\n]}\n"


def _by_track(events: Sequence[Record]) -> dict[str, list[int]]:
    """Return the indices of the spans on each track."""
    tracks: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        if event[0] is not None:
            tracks.setdefault(event[0], []).append(index)
    return tracks


def _rank(track: str) -> tuple[int, str, int]:
    """Return a track's sort key: its first word in `_ORDER`, then its name, then a trailing number."""
    found = re.fullmatch(r"(.*?)\s*(\d*)", track, re.DOTALL)
    assert found is not None
    word = found[1].partition(" ")[0]
    return (
        _ORDER.index(word) if word in _ORDER else len(_ORDER),
        found[1],
        int(found[2]) if found[2] else -1,
    )


def _lanes(events: Sequence[Record], indices: list[int]) -> list[list[int]]:
    """Split the spans of a track into lines on which any two spans are disjoint or nested."""
    # Sorting by nanoseconds keeps the order of consecutive spans that begin in the same microsecond. If two
    # spans have the same times, the outer one ended later and was recorded later.
    ordered = sorted(indices, key=lambda i: (events[i][2], -events[i][3], -i))
    lanes: list[list[int]] = []
    open_ends: list[list[int]] = []  # for each line, the ends of its open spans, innermost last
    for index in ordered:
        start, end = _micro(events[index][2]), _micro(events[index][3])
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                lane.append(index)
                ends.append(end)
                break
        else:
            lanes.append([index])
            open_ends.append([end])
    return lanes


def _micro(nanoseconds: int) -> int:
    """Convert to whole microseconds, the unit of the format. Rounding down keeps the order of times."""
    return nanoseconds // 1000


def _span(event: Record, thread: int) -> str:
    _, name, began, ended, args = event
    start = _micro(began)
    tail = f',"args":{args}' if args else ""
    return (
        f'{{"ph":"X","pid":{_PROCESS},"tid":{thread},"ts":{start},"dur":{_micro(ended) - start},'
        f'"name":{json.dumps(name)}{tail}}}'
    )


def _counter(event: Record) -> str:
    _, name, began, _, args = event
    return f'{{"ph":"C","pid":{_PROCESS},"ts":{_micro(began)},"name":{json.dumps(name)},"args":{args}}}'


def _metadata(kind: str, thread: int, **args: Arg) -> str:
    return f'{{"ph":"M","pid":{_PROCESS},"tid":{thread},"ts":0,"name":"{kind}","args":{encode(args)}}}'
