"""Reads traces and checks their form."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def content(path: Path) -> Any:
    """Parse the file as strictly as the JSON standard."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def spans(events: list[Event], track: str | None = None) -> list[Event]:
    """Complete events of all tracks or of one, in file order."""
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [e for e in events if e["ph"] == "X" and (track is None or threads[e["tid"]] == track)]


def tracks(events: list[Event]) -> list[str]:
    """Names of the tracks from top to bottom."""
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names.keys() == order.keys()
    return [names[thread] for thread in sorted(order, key=lambda thread: order[thread])]


def assert_well_formed(events: list[Event]) -> None:
    """Check that every event has the fields of its kind, and that spans of a thread nest."""
    for event in events:
        assert event["ph"] in "XCM" and isinstance(event["pid"], int) and isinstance(event["name"], str)
        assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            assert isinstance(event["tid"], int) and event["tid"] != event["pid"]
            assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float | str) for value in event["args"].values())
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert {e["tid"] for e in spans(events)} == named
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["offspec"]
    for thread in named:
        ends: list[int] = []
        for event in [e for e in spans(events) if e["tid"] == thread]:
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1], event
            ends.append(event["ts"] + event["dur"])
