"""Pure arithmetic of the upcycle bench: what is to be expected, and what each way reached.

An answer's first pass has the prompt in it, which asks for most experts; figures are of the passes behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.report import ratio
from bench.upcycle.belady import most_hits

STREAMED, OFF, LARGE, PRICED = "all_streamed", "by_need_off", "by_need_large", "by_need_priced"
LLAMA, LLAMA_DRAFTED = "llama_cpp", "llama_cpp_drafted"
TITLES = {
    STREAMED: "all streamed",
    OFF: "by need, no draft",
    LARGE: "by need, large fixed trees",
    PRICED: "by need, priced trees",
    LLAMA: "llama.cpp",
    LLAMA_DRAFTED: "llama.cpp, speculative",
}
OF_LINK, OF_BETTER, OF_BETTER_SKEWED, OF_LLAMA = 0.9, 1.0, 1.3, 2.0

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What bounds a token without a draft.

    Args:
        bandwidth: Of the disk, bytes a second.
        expert_bytes: Of one.
        asked: Experts that a row is sent to, in all layers.
        missed: Share of them that is not in memory, if all are asked for alike.
    """

    bandwidth: float
    expert_bytes: int
    asked: int
    missed: float

    @property
    def token_bytes(self) -> float:
        return self.asked * self.expert_bytes * self.missed

    @property
    def tokens_per_s(self) -> float:
        return ratio(self.bandwidth, self.token_bytes)


def behind_first(answer: Run) -> dict[str, float]:
    """Sums over the passes of an answer behind its first one."""
    passes = answer["per_pass"][1:]
    found = {
        "tokens": sum(one["emitted"] for one in passes),
        "passes": len(passes),
        "seconds": sum(seconds_of(one) for one in passes),
    }
    for name in ("tree_nodes", "bytes_streamed", "experts_asked", "experts_read", "draft_seconds"):
        found[name] = sum(one.get(name, 0) for one in passes)
    return found


def seconds_of(one: Run) -> float:
    return float(one["seconds"] if "seconds" in one else one["draft_seconds"] + one["target_seconds"])


def best_hits(answer: Run) -> int:
    """Hits of the same passes with the best order of eviction; 0 where nothing was asked for."""
    first, *rest = answer["per_pass"]
    calls = [call for one in rest for call in one.get("calls", ())]
    return most_hits(calls, first["slots"], first["kept"]) if calls else 0


def figures(runs: Sequence[Run], expert_bytes: int) -> dict[str, Any]:
    """Of one way, over its answers: see `TITLES`."""
    if failed := [run["error"] for run in runs if "error" in run]:
        return {"error": failed[0]}
    answers = [answer for run in runs for answer in run["answers"]]
    each = [behind_first(answer) for answer in answers]
    total = {name: sum(sums[name] for sums in each) for name in each[0]}
    asked, missed_bytes = total["experts_asked"], total["experts_read"] * expert_bytes
    raw = statistics.median(run["raw_bytes_per_s"] for run in runs)
    found = {
        "tokens_per_s": ratio(total["tokens"], total["seconds"]),
        "tokens_per_pass": ratio(total["tokens"], total["passes"]),
        "nodes_per_pass": ratio(total["tree_nodes"], total["passes"]),
        "seconds_per_pass": ratio(total["seconds"], total["passes"]),
        "draft_seconds_per_pass": ratio(total["draft_seconds"], total["passes"]),
        "bytes_per_token": ratio(total["bytes_streamed"], total["tokens"]) or None,  # None: not told
        "disk_tokens_per_s": ratio(raw * total["tokens"], total["bytes_streamed"]) or None,
        "process_read_bytes": sum(answer.get("read_bytes", 0) for answer in answers),
        "ttft_s": statistics.mean(answer["ttft_s"] for answer in answers),
        "load_seconds": statistics.mean(run["load_seconds"] for run in runs),
        "raw_bytes_per_s": raw,
        "tokens": total["tokens"],
    }
    if asked:
        found |= {
            "experts_per_pass": ratio(asked, total["passes"]),
            "hit_rate": 1 - ratio(total["experts_read"], asked),
            "best_hit_rate": ratio(sum(best_hits(answer) for answer in answers), asked),
            "slots": answers[0]["per_pass"][0]["slots"],
            "missed_bytes_per_token": ratio(missed_bytes, total["tokens"]),
            "of_link": ratio(missed_bytes / raw, total["seconds"]),
        }
    for name in ("cgroup_peak_bytes", "cgroup_anon_peak_bytes"):
        found[name] = max((run[name] for run in runs if name in run), default=None)
    return found


def fastest(runs: Sequence[Run]) -> list[Run]:
    """Of a contender with several settings, the runs of the one with most tokens a second. One that failed
    counts only where all did."""
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(run["settings"], []).append(run)
    whole = [own for own in by_setting.values() if not any("error" in run for run in own)]
    if not whole:
        return list(runs)
    return max(whole, key=lambda own: float(figures(own, 0)["tokens_per_s"]))


def ratios(ways: Mapping[str, Run]) -> dict[str, float]:
    """What the aims are about, as far as it was measured."""
    speed = {name: way["tokens_per_s"] for name, way in ways.items() if "error" not in way}
    found = {}
    if PRICED in speed:
        others = [speed[name] for name in (OFF, LARGE) if name in speed]
        if others:
            found["priced_over_better"] = ratio(speed[PRICED], max(others))
        if STREAMED in speed:
            found["priced_over_streamed"] = ratio(speed[PRICED], speed[STREAMED])
    if OFF in speed:
        found["off_of_link"] = ways[OFF].get("of_link", 0.0)
    ours = [speed[name] for name in (PRICED, OFF) if name in speed]
    for name in (LLAMA, LLAMA_DRAFTED):
        if name in speed and ours:
            found[f"over_{name}"] = ratio(ours[0], speed[name])
    return found


def shortfalls(found: Mapping[str, float], parts: float, skew: float) -> list[str]:
    """A sentence for each aim that was not reached. parts: E/k."""
    better = OF_BETTER_SKEWED if skew and parts in (4, 16) else OF_BETTER
    aims = {
        "priced_over_better": (better, "priced trees are {:.2f}x the better of no draft and large trees"),
        "off_of_link": (OF_LINK, "without a draft the missed experts come at {:.2f} of the disk's rate"),
        "over_llama_cpp": (OF_LLAMA, "priced trees are {:.2f}x llama.cpp"),
    }
    return [
        f"{words.format(found[name])}, where {aim:g} was the aim"
        for name, (aim, words) in aims.items()
        if name in found and found[name] < aim
    ]
