"""Windows of passes between readings of the ceiling, and what they reached of it.

A disk may give 1 GB/s now and 2 in a minute, so a window of ten seconds is judged by the readings just before
and just after it. While a reading is taken the ring is full and reads nothing. A window then begins after one
pass that is not counted, and ends after its last pass: at both moments the ring is equally far ahead of the
computation, so the bytes that arrived in between are those of steady state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.lib.report import Report, ratio
from bench.stream.floor import Compute, synchronize
from offspec.core.config import format_bytes

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel

_QUIET_SECONDS = 0.2  # without a byte moved: the ring is full


@dataclass(frozen=True, slots=True)
class Reading:
    """The ceiling at one moment: bytes per second over the link, and seconds of a pass on the processor."""

    link: float
    compute: Compute


@dataclass(frozen=True, slots=True)
class Window:
    """Passes of `tokens` tokens in a row, in steady state.

    nbytes: moved over the link within `seconds`. waited: seconds that the computation stood still for them.
    """

    tokens: int
    passes: int
    seconds: float
    nbytes: int
    waited: float
    before: Reading
    after: Reading

    @property
    def link(self) -> float:
        """Bytes per second that the link would have given."""
        return (self.before.link + self.after.link) / 2

    @property
    def link_seconds(self) -> float:
        """What the window's bytes take at that rate."""
        return ratio(self.nbytes, self.link)

    @property
    def compute(self) -> Compute:
        """Of one pass."""
        return self.before.compute.mean(self.after.compute)

    @property
    def utilisation(self) -> float:
        return ratio(self.link_seconds, self.seconds)

    def of_bound(self, *, attention: bool = False, layers: bool = False) -> float:
        """The larger of link time and compute time, over wall time; compute is GEMM unless more is asked."""
        compute = self.compute
        of_pass = compute.layers if layers else compute.gemm + (compute.attention if attention else 0.0)
        return ratio(max(self.link_seconds, of_pass * self.passes), self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "passes": self.passes,
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "waited_seconds": self.waited,
            **{
                name: {"link_bytes_per_s": reading.link, **reading.compute.to_json()}
                for name, reading in (("before", self.before), ("after", self.after))
            },
            "utilisation": self.utilisation,
            "of_bound": self.of_bound(),
        }


class Passes:
    """Runs passes of random text, always the same, through a loaded target, each from an empty cache."""

    def __init__(self, target: LoadedModel, *, head: bool = False) -> None:
        """head: also ask for one row of logits, which a head that streams needs to stay in step."""
        import torch

        self.target, self._head = target, head
        self._random = torch.Generator().manual_seed(0)

    @property
    def moved(self) -> int:
        """Bytes over the link that is computed from: the disk's on a CPU, the device's on a device."""
        return self.target.ring_stats.bytes_moved

    @property
    def waited(self) -> float:
        return self.target.ring_stats.wait_seconds

    def run(self, tokens: int) -> None:
        """One pass. One token goes with a second one, as it does when text is decoded."""
        import torch

        from offspec.model.attention import TreeContext

        target = self.target
        model, device = target.tree_model, target.device
        ids = torch.randint(0, target.skeleton.vocab_size, (tokens,), generator=self._random).to(device)
        context = TreeContext.chain(tokens, device)
        if tokens == 1:
            ids, alone = ids.repeat(2), torch.eye(2, dtype=torch.bool, device=device)
            context = TreeContext(0, torch.zeros(2, dtype=torch.int64, device=device), 0, alone)
        with torch.inference_mode():
            hidden = model.hidden(ids, context)
            if self._head:
                model.logits(hidden[-1:])
        synchronize(device)
        model.cache.rewind(0)

    def settle(self, limit: float = 120.0) -> None:
        """Wait until the ring is full: until no byte has moved for a while."""
        start = changed = time.perf_counter()
        before = self.moved
        while (now := time.perf_counter()) - changed < _QUIET_SECONDS and now - start < limit:
            time.sleep(_QUIET_SECONDS / 10)
            if self.moved != before:
                before, changed = self.moved, time.perf_counter()


def run_window(
    passes: Passes,
    tokens: int,
    seconds: float,
    read_link: Callable[[], float],
    floor: Callable[[int], Compute],
) -> Window:
    """Readings, a pass to get going, passes for at least `seconds` (two at least), readings.

    The link is read right before and right after the passes. A disk that stood idle while the processor was
    read may be faster for a moment than it can stay (shared ones save up), so the first reading is made
    twice and the second one counts.
    """
    compute = floor(tokens)
    passes.settle()
    read_link()
    before = Reading(read_link(), compute)
    passes.run(tokens)
    start, moved, waited, done = time.perf_counter(), passes.moved, passes.waited, 0
    while (spent := time.perf_counter() - start) < seconds or done < 2:
        passes.run(tokens)
        done += 1
    moved, waited = passes.moved - moved, passes.waited - waited
    passes.settle()
    return Window(tokens, done, spent, moved, waited, before, Reading(read_link(), floor(tokens)))


def run_rounds(
    args: argparse.Namespace,
    passes: Passes,
    read_link: Callable[[], float],
    floor: Callable[[int], Compute],
    report: Report,
) -> list[Window]:
    """All numbers of tokens in turns, round after round."""
    windows: list[Window] = []
    for turn in range(args.rounds):
        for tokens in args.tokens:
            window = run_window(passes, tokens, args.seconds, read_link, floor)
            windows.append(window)
            report.progress(
                f"round {turn + 1}, {tokens} tokens: {window.seconds / window.passes:.3f} s a pass, link "
                f"{format_bytes(window.link)}/s, in use {window.utilisation:.2f}, of bound "
                f"{window.of_bound():.2f}"
            )
    return windows


def summarise(windows: Sequence[Window]) -> dict[str, Any]:
    """Medians over windows of one number of tokens, with the least and the most; seconds are a pass's."""
    passes = [window.passes for window in windows]
    figures: dict[str, list[float]] = {
        "seconds": [w.seconds / w.passes for w in windows],
        "bytes": [w.nbytes / w.passes for w in windows],
        "waited_seconds": [w.waited / w.passes for w in windows],
        "link_seconds": [w.link_seconds / w.passes for w in windows],
        "gemm_seconds": [w.compute.gemm for w in windows],
        "attention_seconds": [w.compute.attention for w in windows],
        "layers_seconds": [w.compute.layers for w in windows],
        "link_bytes_per_s": [w.link for w in windows],
        "utilisation": [w.utilisation for w in windows],
        "of_bound": [w.of_bound() for w in windows],
        "of_bound_with_attention": [w.of_bound(attention=True) for w in windows],
        "of_bound_with_layers": [w.of_bound(layers=True) for w in windows],
    }
    return {
        "tokens": windows[0].tokens,
        "windows": len(windows),
        "passes": sum(passes),
        **{name: statistics.median(values) for name, values in figures.items()},
        # All windows as one: drift that the readings missed cancels out, which it need not in a median.
        "pooled_utilisation": ratio(
            sum(window.link_seconds for window in windows), sum(window.seconds for window in windows)
        ),
        "spread": {name: [min(values), max(values)] for name, values in figures.items()},
    }


def summarise_all(windows: list[Window]) -> list[dict[str, Any]]:
    """A summary for each number of tokens, in order."""
    counts = sorted({window.tokens for window in windows})
    return [summarise([window for window in windows if window.tokens == count]) for count in counts]
