"""The timeline: the file that Perfetto opens, threads, the bound, and files that cannot be written."""

import errno
import gzip
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.core import trace as module
from offspec.core.errors import DiskFullError, RequestError
from offspec.core.trace import OFF, Timeline, check_writable
from offspec.core.trace_format import Record, lines
from tests.support.traces import assert_well_formed, content, spans, tracks


def test_a_file_of_spans_counters_and_metadata(tmp_path: Path) -> None:
    timeline, file = Timeline(on=True), tmp_path / "run.json"
    with timeline.span("engine", "pass") as span:
        with timeline.span("draft", "grow"):
            for width in (1, 8):
                with timeline.span("draft", "step", width=width):
                    pass
        with timeline.span("compute", "layer 0", tokens=9, share=0.5, kind="full"):
            pass
        span.note(emitted=3)
    timeline.counter("bytes read", 4096)
    timeline.write(file, {"model": "demo", "budget": 64})

    written = content(file)
    events = written["traceEvents"]
    assert_well_formed(events)
    assert tracks(events) == ["engine", "draft", "compute"]
    assert [(e["name"], e.get("args")) for e in spans(events, "draft")] == [
        ("grow", None),
        ("step", {"width": 1}),
        ("step", {"width": 8}),
    ]
    assert spans(events, "compute")[0]["args"] == {"tokens": 9, "share": 0.5, "kind": "full"}
    assert spans(events, "engine")[0]["args"] == {"emitted": 3}
    assert [(e["name"], e["args"]) for e in events if e["ph"] == "C"] == [("bytes read", {"value": 4096})]
    assert written["otherData"] == {"model": "demo", "budget": 64, "events": 6, "dropped_events": 0}
    assert timeline.kept == 6


def test_times_are_microseconds_of_a_clock_that_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([1_000_000, 1_002_500, 1_004_500, 1_009_999])
    monkeypatch.setattr("offspec.core.trace.time.perf_counter_ns", lambda: next(now))
    timeline = Timeline(on=True)
    with timeline.span("compute", "layer 0"):
        pass
    timeline.counter("bytes read", 1)
    timeline.write(tmp_path / "t.json")
    timed = [e for e in content(tmp_path / "t.json")["traceEvents"] if e["ph"] != "M"]
    assert [(e["ts"], e.get("dur")) for e in timed] == [(2, 2), (9, None)]


def test_tracks_are_ordered_from_the_whole_to_the_parts() -> None:
    names = [
        "load",
        "read 10",
        "zoo",
        "read 2",
        "copy",
        "compute",
        "verify",
        "draft",
        "engine",
        "prefill",
        "aside 1",
    ]
    text = "".join(lines([(name, "x", 0, 1, "") for name in names], 0, {}))
    assert tracks(json.loads(text)["traceEvents"]) == [
        "engine",
        "load",
        "prefill",
        "draft",
        "verify",
        "compute",
        "copy",
        "read 2",
        "read 10",
        "aside 1",
        "zoo",
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(["read 0", "draft"]), st.integers(0, 12_000), st.integers(0, 12_000)),
        max_size=12,
    )
)
def test_any_spans_come_out_nested_and_none_is_lost(times: list[tuple[str, int, int]]) -> None:
    records: list[Record] = [
        (track, str(index), began, began + length, "") for index, (track, began, length) in enumerate(times)
    ]
    events = json.loads("".join(lines(records, 0, {})))["traceEvents"]
    assert_well_formed(events)
    assert sorted(int(e["name"]) for e in spans(events)) == list(range(len(times)))


def test_spans_of_two_threads_on_one_track_get_a_line_each() -> None:
    records: list[Record] = [("copy", "a", 0, 5000, ""), ("copy", "b", 3000, 8000, "")]
    events = json.loads("".join(lines(records, 0, {})))["traceEvents"]
    assert [(name, spans(events, name)[0]["name"]) for name in tracks(events)] == [
        ("copy", "a"),
        ("copy (2)", "b"),
    ]


def test_a_span_that_begins_where_another_ends_shares_its_line() -> None:
    records: list[Record] = [("copy", "a", 0, 5000, ""), ("copy", "b", 5000, 8000, "")]
    events = json.loads("".join(lines(records, 0, {})))["traceEvents"]
    assert [one["name"] for one in spans(events, "copy")] == ["a", "b"]


def test_threads_record_at_once(tmp_path: Path) -> None:
    timeline, start = Timeline(on=True), threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for index in range(500):
            with timeline.span(f"read {number}", "layer", index=index):
                timeline.counter("bytes", index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    timeline.write(tmp_path / "early.json")  # of whatever there is by now
    for thread in threads:
        thread.join()
    timeline.write(tmp_path / "t.json")
    assert_well_formed(content(tmp_path / "early.json")["traceEvents"])
    events = content(tmp_path / "t.json")["traceEvents"]
    assert_well_formed(events)
    for number in range(4):
        found = spans(events, f"read {number}")
        assert [e["args"]["index"] for e in found] == list(range(500))


def test_what_exceeds_the_bound_is_counted_and_told(tmp_path: Path) -> None:
    timeline = Timeline(on=True, limit=3)
    for index in range(10):
        with timeline.span("compute", f"layer {index}"):
            pass
    assert (timeline.kept, timeline.dropped) == (3, 7)
    timeline.write(tmp_path / "t.json")
    written = content(tmp_path / "t.json")
    assert [e["name"] for e in spans(written["traceEvents"])] == ["layer 0", "layer 1", "layer 2"]
    assert (written["otherData"]["events"], written["otherData"]["dropped_events"]) == (3, 7)
    labels = [e["args"]["labels"] for e in written["traceEvents"] if e["name"] == "process_labels"]
    assert labels == ["7 later events are missing"]


def test_off_records_nothing_and_builds_nothing() -> None:
    first = OFF.span("read 0", "layer 0", bytes=4096)
    assert first is OFF.span("draft", "step") is Timeline().span("copy", "x")
    with first as span:
        span.note(emitted=1)
    OFF.counter("bytes", 1)
    assert OFF.on is False and OFF.kept == 0


def test_off_does_not_swallow_exceptions() -> None:
    with pytest.raises(KeyboardInterrupt), OFF.span("draft", "step"):
        raise KeyboardInterrupt


def test_a_span_broken_off_is_recorded_with_its_error(tmp_path: Path) -> None:
    timeline = Timeline(on=True)
    with pytest.raises(KeyboardInterrupt), timeline.span("engine", "pass", nodes=4):
        raise KeyboardInterrupt
    timeline.write(tmp_path / "t.json")
    (event,) = spans(content(tmp_path / "t.json")["traceEvents"])
    assert event["args"] == {"nodes": 4, "error": "KeyboardInterrupt"}


def test_names_and_values_of_every_kind_are_json(tmp_path: Path) -> None:
    timeline, name = Timeline(on=True), 'layer "0"\n\\ ☀ \ud800'
    with timeline.span("größe", name, nan=math.nan, inf=math.inf, path=Path("x")):
        pass
    timeline.counter("rate", math.inf)
    timeline.write(tmp_path / "t.json", {"text": "☀"})
    written = content(tmp_path / "t.json")
    (event,) = spans(written["traceEvents"], "größe")
    assert event["name"] == name
    assert event["args"] == {"nan": "nan", "inf": "inf", "path": "x"}
    assert written["otherData"]["text"] == "☀"


def test_an_empty_timeline_is_a_valid_file(tmp_path: Path) -> None:
    Timeline(on=True).write(tmp_path / "t.json")
    assert_well_formed(content(tmp_path / "t.json")["traceEvents"])


def test_a_name_that_ends_in_gz_is_packed(tmp_path: Path) -> None:
    timeline = Timeline(on=True)
    with timeline.span("draft", "step"):
        pass
    timeline.write(tmp_path / "t.json.gz")
    timeline.write(tmp_path / "t.json")
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Writing goes wrong half way, with the error number that the test puts in."""
    numbers = [errno.ENOSPC]

    def broken(*_: object) -> Iterator[str]:
        yield "{" * 100_000
        raise OSError(numbers[0], os.strerror(numbers[0]))

    monkeypatch.setattr(module, "lines", broken)
    yield numbers


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, RequestError)],
)
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, failing: list[int], number: int, kind: type[Exception]
) -> None:
    file, failing[0] = tmp_path / "t.json", number
    file.write_text("old")
    with pytest.raises(kind) as caught:
        Timeline(on=True).write(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_an_interrupt_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Iterator[str]:
        yield "{"
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "lines", interrupted)
    (tmp_path / "t.json").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        Timeline(on=True).write(tmp_path / "t.json")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("t.json", "old")]


def write(path: Path) -> None:
    Timeline(on=True).write(path)


@pytest.mark.parametrize("use", [write, check_writable])
@pytest.mark.parametrize(
    ("name", "named"), [("no/such/t.json", "no folder"), ("", "a folder"), ("file/t.json", "no folder")]
)
def test_places_where_no_file_can_go(tmp_path: Path, use: Any, name: str, named: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=named):
        use(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("use", [write, check_writable])
def test_what_is_not_a_file_stays_as_it_is(tmp_path: Path, use: Any) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RequestError, match="not an ordinary file"):
        use(pipe)
    assert list(tmp_path.iterdir()) == [pipe] and pipe.is_fifo()


@pytest.mark.parametrize("use", [write, check_writable])
def test_a_folder_without_permission(tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:  # permissions do not hold for root, who may run the tests
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("offspec.core.trace.os.open", refused)
    with pytest.raises(RequestError, match="Permission denied; name a file in a folder that you may write"):
        use(tmp_path / "t.json")


def test_checking_leaves_nothing_behind_and_keeps_what_is_there(tmp_path: Path) -> None:
    check_writable(tmp_path / "t.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "t.json").write_text("old")
    check_writable(tmp_path / "t.json")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("t.json", "old")]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert_well_formed(content(tmp_path / "real.json")["traceEvents"])
