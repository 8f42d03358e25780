"""Passes that several answers share, told once each, and by what went on in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offspec.core.events import PassStats

KINDS = ("steady", "with a prompt", "fewer")


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A pass of all its sequences.

    kind: of `KINDS`: all sequences had a tree and none its prompt; one had; some were idle. steps: of the
    draft. wait, compute: of `target`. Times are in seconds.
    """

    kind: str
    sequences: int
    tokens: int
    rows: int
    steps: int
    nbytes: int
    draft: float
    target: float
    wait: float
    compute: float


def shared_passes(told: Iterable[PassStats], sequences: int) -> list[SharedPass]:
    """Each pass once, of which every answer that had a tree in it tells.

    A pass that read prompts and nothing else is told by nobody, and is not here.

    Args:
        told: By all answers.
        sequences: That there were to be side by side.
    """
    groups = defaultdict[tuple[float, float], list["PassStats"]](list)
    for stats in told:
        groups[stats.draft_seconds, stats.target_seconds].append(stats)  # to the nanosecond those of one pass
    return [_shared(members, sequences) for members in groups.values()]


def _shared(members: Sequence[PassStats], sequences: int) -> SharedPass:
    one = members[0]
    reads = any(member.index == 1 for member in members) or len(members) < one.sequences
    return SharedPass(
        kind="with a prompt" if reads else "steady" if len(members) == sequences else "fewer",
        sequences=one.sequences,
        tokens=sum(member.emitted for member in members),
        rows=sum(member.tree_nodes for member in members),
        steps=max(member.draft_steps for member in members),
        nbytes=one.bytes_streamed,
        draft=one.draft_seconds,
        target=one.target_seconds,
        wait=one.wait_seconds,
        compute=one.compute_seconds,
    )


def by_kind(passes: Sequence[SharedPass]) -> dict[str, dict[str, Any]]:
    """Of each kind that there were: how many, tokens and seconds in all, and the means of a pass."""
    found = dict[str, dict[str, Any]]()
    for kind in KINDS:
        some = [asdict(one) for one in passes if one.kind == kind]
        if some:
            mean = {name: sum(one[name] for one in some) / len(some) for name in some[0] if name != "kind"}
            seconds = mean["draft"] + mean["target"]
            mean |= {"seconds": seconds, "tokens_per_s": mean["tokens"] / seconds}
            found[kind] = {"passes": len(some), **mean, "bytes_per_s": mean["nbytes"] / seconds}
    return found
