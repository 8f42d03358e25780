"""The timeline: the file that Perfetto opens, threads, the size limit, and write errors."""

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
from offspec.core.trace import OFF, Record, Timeline, check_writable, lines
from tests.support.traces import assert_well_formed, content, spans, tracks


def written(records: list[Record]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads("".join(lines(records, 0, {})))["traceEvents"]
    return events


def test_file_has_spans_counters_and_metadata(tmp_path: Path) -> None:
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

    found = content(file)
    events = found["traceEvents"]
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
    assert found["otherData"] == {"model": "demo", "budget": 64, "events": 6, "dropped_events": 0}
    assert timeline.kept == 6


def test_times_are_microseconds_of_a_steady_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1_000_000, 1_002_500, 1_004_500, 1_009_999])
    monkeypatch.setattr("offspec.core.trace.time.perf_counter_ns", lambda: next(now))
    timeline = Timeline(on=True)
    with timeline.span("compute", "layer 0"):
        pass
    timeline.counter("bytes read", 1)
    timeline.write(tmp_path / "t.json")
    timed = [e for e in content(tmp_path / "t.json")["traceEvents"] if e["ph"] != "M"]
    assert [(e["ts"], e.get("dur")) for e in timed] == [(2, 2), (9, None)]


def test_tracks_are_ordered_from_whole_to_parts() -> None:
    wanted = [
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
    ]
    assert tracks(written([(name, "x", 0, 1, "") for name in sorted(wanted)])) == wanted


@given(
    st.lists(
        st.tuples(st.sampled_from(["read 0", "draft"]), st.integers(0, 12_000), st.integers(0, 12_000)),
        max_size=12,
    )
)
def test_spans_are_nested_and_complete(times: list[tuple[str, int, int]]) -> None:
    records: list[Record] = [
        (track, str(index), began, began + length, "") for index, (track, began, length) in enumerate(times)
    ]
    events = written(records)
    assert_well_formed(events)
    assert sorted(int(e["name"]) for e in spans(events)) == list(range(len(times)))


@pytest.mark.parametrize(("began", "found"), [(3000, ["copy", "copy (2)"]), (5000, ["copy"])])
def test_overlapping_threads_on_a_track_get_separate_lines(began: int, found: list[str]) -> None:
    """If they overlap; a span that begins at the end of another shares its line."""
    events = written([("copy", "a", 0, 5000, ""), ("copy", "b", began, 8000, "")])
    assert tracks(events) == found
    assert [one["name"] for one in spans(events)] == ["a", "b"]


def test_threads_record_concurrently(tmp_path: Path) -> None:
    timeline, start = Timeline(on=True), threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for index in range(200):
            with timeline.span(f"read {number}", "layer", index=index):
                timeline.counter("bytes", index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    timeline.write(tmp_path / "early.json")  # of any spans recorded so far
    for thread in threads:
        thread.join()
    timeline.write(tmp_path / "t.json")
    assert_well_formed(content(tmp_path / "early.json")["traceEvents"])
    events = content(tmp_path / "t.json")["traceEvents"]
    assert_well_formed(events)
    for number in range(4):
        found = spans(events, f"read {number}")
        assert [e["args"]["index"] for e in found] == list(range(200))


def test_events_over_the_limit_are_counted_and_reported(tmp_path: Path) -> None:
    timeline = Timeline(on=True, limit=3)
    for index in range(10):
        with timeline.span("compute", f"layer {index}"):
            pass
    assert (timeline.kept, timeline.dropped) == (3, 7)
    timeline.write(tmp_path / "t.json")
    found = content(tmp_path / "t.json")
    assert [e["name"] for e in spans(found["traceEvents"])] == ["layer 0", "layer 1", "layer 2"]
    assert (found["otherData"]["events"], found["otherData"]["dropped_events"]) == (3, 7)
    labels = [e["args"]["labels"] for e in found["traceEvents"] if e["name"] == "process_labels"]
    assert labels == ["7 later events are missing"]


def test_disabled_timeline_records_nothing_and_passes_exceptions() -> None:
    with pytest.raises(KeyboardInterrupt), OFF.span("draft", "step"):
        raise KeyboardInterrupt
    first = OFF.span("read 0", "layer 0", bytes=4096)
    assert first is OFF.span("draft", "step") is Timeline().span("copy", "x")
    with first as span:
        span.note(emitted=1)
    OFF.counter("bytes", 1)
    assert OFF.on is False and OFF.kept == 0


def test_failed_span_is_recorded_with_its_error(tmp_path: Path) -> None:
    timeline, name = Timeline(on=True), 'layer "0"\n\\ ☀ \ud800'
    with (
        pytest.raises(KeyboardInterrupt),
        timeline.span("größe", name, nan=math.nan, inf=math.inf, path=Path("x")),
    ):
        raise KeyboardInterrupt
    timeline.counter("rate", math.inf)
    timeline.write(tmp_path / "t.json", {"text": "☀"})
    found = content(tmp_path / "t.json")
    (event,) = spans(found["traceEvents"], "größe")
    assert event["name"] == name and found["otherData"]["text"] == "☀"
    assert event["args"] == {"nan": "nan", "inf": "inf", "path": "x", "error": "KeyboardInterrupt"}


def test_gz_suffix_compresses_the_file(tmp_path: Path) -> None:
    timeline = Timeline(on=True)
    timeline.write(tmp_path / "t.json.gz")
    timeline.write(tmp_path / "t.json")
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes()
    assert_well_formed(content(tmp_path / "t.json")["traceEvents"])  # and empty


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError),
        (OSError(errno.EIO, "Input/output error"), RequestError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full disk", "bad disk", "interrupt"],
)
def test_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, kind: type[BaseException]
) -> None:
    def broken(*_: object) -> Iterator[str]:
        yield "{" * 100_000
        raise failure

    monkeypatch.setattr(module, "lines", broken)
    file = tmp_path / "t.json"
    file.write_text("old")
    with pytest.raises(kind) as caught:
        write(file)
    if caught.value is not failure:
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def write(path: Path) -> None:
    Timeline(on=True).write(path)


BOTH = pytest.mark.parametrize("use", [write, check_writable])


@BOTH
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/such/t.json", "no/such does not exist"),
        ("", "a folder"),
        ("file/t.json", "file does not exist"),
        ("pipe", "not an ordinary file"),
    ],
)
def test_unwritable_paths(tmp_path: Path, use: Any, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match=why):
        use(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"] and (tmp_path / "pipe").is_fifo()


@BOTH
def test_folder_without_permission(tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:  # permissions do not apply to root, who may run the tests
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("offspec.core.trace.os.open", refused)
    with pytest.raises(RequestError, match="Permission denied; choose a file in a folder that you can write"):
        use(tmp_path / "t.json")


def test_check_leaves_no_files_and_keeps_symlinks(tmp_path: Path) -> None:
    check_writable(tmp_path / "t.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    check_writable(tmp_path / "link.json")
    assert (tmp_path / "real.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert_well_formed(content(tmp_path / "real.json")["traceEvents"])
