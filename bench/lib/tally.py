"""Pure arithmetic of the offload bench: ceilings, and what runs reached of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.report import ratio
from offspec_planners.measure import Bandwidth

Answer = Mapping[str, Any]  # of a measured process, as JSON has it


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What bounds a pass: bytes over the link, and FLOPs over the processor; they overlap at best.

    gemm: FLOP/s by tokens in a batch. The head's bytes are told apart, since an engine may keep it.
    """

    bandwidth: Bandwidth
    layer_bytes: int
    head_bytes: int
    flops_per_token: int
    gemm: dict[int, float]

    @property
    def link_seconds(self) -> float:
        """Seconds of a pass that streams every layer."""
        return ratio(self.layer_bytes, self.bandwidth.bytes_per_s)

    def compute_seconds(self, tokens: float) -> float:
        """Seconds of a pass of so many tokens, at the rate of the nearest count that was measured."""
        nearest = min(self.gemm, key=lambda count: abs(math.log(count / max(tokens, 1))))
        return ratio(self.flops_per_token * tokens, self.gemm[nearest])

    def to_json(self, budget: int) -> dict[str, Any]:
        return {
            "raw_bytes_per_s": self.bandwidth.bytes_per_s,
            "direct": self.bandwidth.direct,
            "layer_bytes": self.layer_bytes,
            "head_bytes": self.head_bytes,
            "link_seconds_per_pass": self.link_seconds,
            "compute_seconds_one_token": self.compute_seconds(1),
            "compute_seconds_full_tree": self.compute_seconds(budget),
            "gemm_flops_per_s": {str(tokens): rate for tokens, rate in self.gemm.items()},
        }


def tally(runs: Sequence[dict[str, Any]], temperature: float, ceiling: Ceiling) -> dict[str, Any]:
    """The figures of one temperature, from the JSON of its worker processes."""
    here = [run for run in runs if run["temperature"] == temperature]
    off = {answer["id"]: answer for run in here if not run["speculate"] for answer in run["answers"]}
    on = {answer["id"]: answer for run in here if run["speculate"] for answer in run["answers"]}
    tokens = sum(answer["tokens"] for answer in on.values())
    seconds = sum(answer["seconds"] for answer in on.values())
    passes = sum(answer["passes"] for answer in on.values())
    per_pass = ratio(tokens, passes)
    projected = sum(project(off[name], on[name]["tokens"]) for name in on)
    parted = differences(off, on)
    nodes = ratio(sum(p["tree_nodes"] for a in on.values() for p in a["per_pass"]), passes)
    # What was streamed, at the speed that the disk had in those minutes, and what was computed: resident
    # layers and small trees have their credit.
    pass_floor = max(ratio(_bytes_per_pass(on), _raw(here)), ceiling.compute_seconds(nodes))
    return {
        "temperature": temperature,
        "prompts": len(on),
        "off_seconds_per_token": ratio(projected, tokens),
        "off_seconds_per_token_whole_runs": ratio(
            sum(a["seconds"] for a in off.values()), sum(a["tokens"] for a in off.values())
        ),
        "off_tokens": sum(a["tokens"] for a in off.values()),
        "on_tokens": tokens,
        "on_passes": passes,
        "on_tokens_per_s": ratio(tokens, seconds),
        "speed_up": ratio(projected, seconds),
        "tokens_per_pass": per_pass,
        "nodes_per_pass": nodes,
        "ceiling_seconds_per_pass": pass_floor,
        "on_seconds_per_pass": ratio(seconds, passes),
        "on_draft_seconds_per_pass": ratio(sum(a["draft_seconds"] for a in on.values()), passes),
        "on_target_seconds_per_pass": ratio(sum(a["target_seconds"] for a in on.values()), passes),
        "off_bytes_per_pass": _bytes_per_pass(off),
        "on_bytes_per_pass": _bytes_per_pass(on),
        "off_link_use": link_use(here, speculate=False),
        "on_link_use": link_use(here, speculate=True),
        "ceiling_tokens_per_s": ratio(per_pass, pass_floor),
        "prompts_with_another_token": len(parted),
        "first_differences": parted,
        "check_gaps": _gaps(on),
        **{key: _peak(here, key) for key in _PEAKS},
    }


_PEAKS = ("cgroup_peak_bytes", "cgroup_anon_peak_bytes", "process_peak_bytes")


def project(answer: dict[str, Any], tokens: int) -> float:
    """Seconds that an unspeculated run would take for `tokens`: first token, then its median pass."""
    passes = [p["draft_seconds"] + p["target_seconds"] for p in answer["per_pass"][1:]]
    steady = statistics.median(passes) if passes else answer["ttft_s"]
    return float(answer["ttft_s"] + max(tokens - 1, 0) * steady)


def first_difference(off: Answer, on: Answer) -> int | None:
    """Where two answers part, or None: as far as the shorter goes, if it was cut by its limit of tokens."""
    pairs = zip(off["token_ids"], on["token_ids"], strict=False)
    for index, (left, right) in enumerate(pairs):
        if left != right:
            return index
    shorter, longer = sorted((off, on), key=lambda answer: len(answer["token_ids"]))
    common = len(shorter["token_ids"])
    # A run that met its own end must be as long as the other one.
    ended = shorter["finish_reason"] != "length" and len(longer["token_ids"]) > common
    return common if ended else None


def differences(off: Mapping[str, Answer], on: Mapping[str, Answer]) -> dict[str, int]:
    """Where answers part, by prompt; those that do not, or that only one side has, are left out."""
    places = {name: first_difference(off[name], on[name]) for name in on if name in off}
    return {name: place for name, place in places.items() if place is not None}


def link_use(runs: Sequence[dict[str, Any]], *, speculate: bool) -> float:
    """Bytes streamed over the bytes that the raw disk would have given in the same seconds."""
    chosen = [run for run in runs if run["speculate"] is speculate]
    streamed = sum(a["bytes_streamed"] for run in chosen for a in run["answers"])
    possible = sum(a["seconds"] * run["raw_bytes_per_s"] for run in chosen for a in run["answers"])
    return ratio(streamed, possible)


def _bytes_per_pass(answers: dict[str, dict[str, Any]]) -> float:
    return ratio(
        sum(a["bytes_streamed"] for a in answers.values()), sum(a["passes"] for a in answers.values())
    )


def _gaps(answers: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """With --check: for each prompt that parted, how near the two best logits were (nats)."""
    checked = {name: a["mismatches"] for name, a in answers.items() if a.get("mismatches") is not None}
    return {name: found[0]["gap"] for name, found in checked.items() if found} if checked else None


def _raw(runs: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(run["raw_bytes_per_s"] for run in runs))


def _peak(runs: Sequence[dict[str, Any]], key: str) -> int | None:
    return max((run[key] for run in runs if key in run), default=None)
