"""Recorded events as text in the trace-event format: "Trace Event Format", Google, 2016.

Complete events ("X") for spans, counter events ("C"), and metadata ("M") that names and orders the tracks.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence

Arg = int | float | str

Record = tuple[str | None, str, int, int, str]
"""Track (None: a counter), name, start and end in nanoseconds, and arguments as the text of a JSON object."""

_PROCESS = 1  # no track has this number: Perfetto would take it for the process's main thread
_FIRST_TRACK = 2

# From the whole to its parts, as one reads the picture from top to bottom. Others follow by name.
_ORDER = ("engine", "load", "prefill", "draft", "verify", "compute", "copy", "read")


def encode(args: Mapping[str, Arg]) -> str:
    """Arguments as the text of a JSON object, in which infinities and NaN are strings; "" for none."""
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
    """The text of the file, one event a line. dropped: how many events more there were than are given."""
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
    """Indices of the spans on each track."""
    tracks: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        if event[0] is not None:
            tracks.setdefault(event[0], []).append(index)
    return tracks


def _rank(track: str) -> tuple[int, str, int]:
    """Sorts tracks: by their first word as `_ORDER` has it, then by name, a number at its end by value."""
    found = re.fullmatch(r"(.*?)\s*(\d*)", track, re.DOTALL)
    assert found is not None
    word = found[1].partition(" ")[0]
    return (
        _ORDER.index(word) if word in _ORDER else len(_ORDER),
        found[1],
        int(found[2]) if found[2] else -1,
    )


def _lanes(events: Sequence[Record], indices: list[int]) -> list[list[int]]:
    """The spans of a track, parted into lines on which any two are apart or one lies within the other."""
    # In nanoseconds: of two spans that begin in one microsecond, one behind the other, the first comes first.
    # Of two spans with the same times the outer one ended, and so was recorded, later.
    ordered = sorted(indices, key=lambda i: (events[i][2], -events[i][3], -i))
    lanes: list[list[int]] = []
    open_ends: list[list[int]] = []  # for each line, the ends of the spans that are open, inmost last
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
    """Whole microseconds, the unit of the format. Rounding down keeps the order of any two times."""
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
