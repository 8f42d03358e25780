"""Pure arithmetic of the quantised bench: passes beside their bounds, and one target beside the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.lib.report import ratio
from bench.lib.tally import differences

BF16, NF4 = "bfloat16", "nf4"
LEAST_BYTES_RATIO = 3.3
MOST_OVER_BOUND = 1.15
Figures = Mapping[str, Any]


def judged(window: Figures, before: Figures, after: Figures, *, packed: bool) -> dict[str, Any]:
    """A window's figures of one pass with its bound: the larger of link time and what the processor needs.

    before, after: the processor's floors on both sides of the window, as `quantised_floor` prints them.
    over_bound is the time over the bound, 1 at best; over_together the same where unpacking and products were
    timed together, so that the products found the values in the cache.
    """
    rows = str(rows_of(window["tokens"]))

    def mean(name: str) -> float:
        return float((before["by_rows"][rows][name] + after["by_rows"][rows][name]) / 2)

    unpacking = (before["unpacking_seconds"] + after["unpacking_seconds"]) / 2 if packed else 0.0
    compute = unpacking + mean("gemm_seconds")
    together = mean("together_seconds") if packed else compute
    link = window["link_seconds"]
    return {
        **window,
        "unpacking_seconds": unpacking,
        "gemm_seconds": mean("gemm_seconds"),
        "together_seconds": together,
        "layers_seconds": mean("layers_seconds"),
        "bound_seconds": max(link, compute),
        "over_bound": ratio(window["seconds"], max(link, compute)),
        "over_together": ratio(window["seconds"], max(link, together)),
    }


def rows_of(tokens: int) -> int:
    """Rows of a pass: a single token goes with another one, as it does when text is decoded."""
    return max(tokens, 2)


def passes(windows: Mapping[str, Sequence[Figures]]) -> list[dict[str, Any]]:
    """By number of tokens, the medians of both targets' windows, and how they compare."""
    found = []
    for tokens in dict.fromkeys(window["tokens"] for window in windows[NF4]):
        both = {
            kind: {
                name: median(w[name] for w in of_kind if w["tokens"] == tokens)
                for name in of_kind[0]
                if name != "tokens"
            }
            for kind, of_kind in windows.items()
        }
        found.append(
            {
                "tokens": tokens,
                **both,
                "bytes_ratio": ratio(both[BF16]["bytes"], both[NF4]["bytes"]),
                "speed_up": ratio(both[BF16]["seconds"], both[NF4]["seconds"]),
            }
        )
    return found


def answers(runs: Sequence[Figures], kind: str, way: str) -> dict[str, Figures]:
    """By prompt, the answers of one target in one way."""
    chosen = [run for run in runs if (run["kind"], run["way"]) == (kind, way)]
    return {answer["id"]: answer for run in chosen for answer in run["answers"]}


def speed(runs: Sequence[Figures], kind: str, way: str) -> dict[str, Any]:
    """What the answers of one target in one way took, whole: the prompt, drafting and passes."""
    given = answers(runs, kind, way).values()
    tokens, seconds, taken = (sum(a[key] for a in given) for key in ("tokens", "seconds", "passes"))
    return {
        "tokens": tokens,
        "tokens_per_s": ratio(tokens, seconds),
        "tokens_per_pass": ratio(tokens, taken),
        "seconds_per_pass": ratio(seconds, taken),
        "draft_seconds_per_pass": ratio(sum(a["draft_seconds"] for a in given), taken),
        "bytes_per_pass": ratio(sum(a["bytes_streamed"] for a in given), taken),
    }


def speeds(runs: Sequence[Figures], ways: Sequence[str], off: str) -> dict[str, Any]:
    """tok/s of both targets in each way, the gain of the quantised one, and answers that were changed."""
    by_way: dict[str, Any] = {}
    for way in ways:
        both = {kind: speed(runs, kind, way) for kind in (BF16, NF4)}
        gain = ratio(both[NF4]["tokens_per_s"], both[BF16]["tokens_per_s"])
        by_way[way] = {**both, "gain": gain}
    fastest = {kind: max(by_way[way][kind]["tokens_per_s"] for way in ways) for kind in (BF16, NF4)}
    parted = {
        f"{kind}, {way}, {name}": place
        for kind in (BF16, NF4)
        for way in ways
        for name, place in differences(answers(runs, kind, off), answers(runs, kind, way)).items()
    }
    return {
        "ways": by_way,
        "fastest_tokens_per_s": fastest,
        "fastest_gain": ratio(fastest[NF4], fastest[BF16]),
        "first_differences": parted,
    }


def shortfalls(rows: Sequence[Figures], answered: Figures | None) -> list[str]:
    """One plain sentence for each aim that was not reached."""
    told = []
    for row in rows:
        at = f"with {row['tokens']} tokens a pass"
        if row["bytes_ratio"] < LEAST_BYTES_RATIO:
            told.append(
                f"{row['bytes_ratio']:.2f} times fewer bytes {at}, where {LEAST_BYTES_RATIO} was the aim"
            )
        over = row[NF4]["over_bound"]
        if over > MOST_OVER_BOUND:
            told.append(
                f"a pass in NF4 takes {over:.2f} of its bound {at}, where {MOST_OVER_BOUND} was the most"
            )
    parted = answered["first_differences"] if answered else {}
    if parted:
        told.append(f"speculation changed {len(parted)} answers: {parted}")
    return told
