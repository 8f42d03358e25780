"""Windows of passes between measurements of the ceiling, and their utilization of it.

A disk may give 1 GB/s now and 2 in a minute, so a window of ten seconds is compared with the measurements
just before and just after it. During a measurement the ring buffer is full and reads nothing. A window then
starts after one uncounted pass, and ends after its last pass. At both moments the ring buffer is equally far
ahead of the computation, so the bytes that arrived in between are those of steady state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.lib.report import Report, ratio
from bench.stream.floor import Compute, synchronize
from offspec_planners.units import format_bytes

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel

_QUIET_SECONDS = 0.2  # without transfers, the ring buffer is full


@dataclass(frozen=True, slots=True)
class Reading:
    """A measurement of the ceiling: bytes per second over the link, and processor seconds per pass."""

    link: float
    compute: Compute


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive passes of `tokens` tokens, in steady state.

    nbytes: bytes transferred within `seconds`. waited: seconds in which computation waited for them.
    """

    tokens: int
    passes: int
    seconds: float
    nbytes: int
    waited: float
    before: Reading
    after: Reading

    def figures(self) -> dict[str, float]:
        """Return seconds and bytes of one pass, the times of link and processor alone by the measurements on
        both sides, and shares of the larger of the two."""
        link, compute = (self.before.link + self.after.link) / 2, self.before.compute.mean(self.after.compute)
        seconds, nbytes = self.seconds / self.passes, self.nbytes / self.passes
        alone = ratio(nbytes, link)
        return {
            "seconds": seconds,
            "bytes": nbytes,
            "waited_seconds": self.waited / self.passes,
            "link_seconds": alone,
            **compute.to_json(),
            "link_bytes_per_s": link,
            "utilization": ratio(alone, seconds),
            "of_bound": ratio(max(alone, compute.gemm), seconds),
            "of_bound_with_attention": ratio(max(alone, compute.gemm + compute.attention), seconds),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the window and its shares of the ceiling."""
        figures = self.figures()
        return {**asdict(self), **{name: figures[name] for name in ("utilization", "of_bound")}}


class PassRunner:
    """Runs passes of a fixed random text through a loaded target, each with an empty cache."""

    def __init__(self, target: LoadedModel, *, head: bool = False) -> None:
        """head: also compute one row of logits, which keeps a streamed head synchronized."""
        import torch

        self.target, self._head = target, head
        self._random = torch.Generator().manual_seed(0)

    @property
    def bytes_transferred(self) -> int:
        """Bytes transferred over the link."""
        return self.target.ring_stats.bytes_moved

    @property
    def waited(self) -> float:
        return self.target.ring_stats.wait_seconds

    def run(self, tokens: int) -> None:
        """Run one pass. A single token is computed with a second row, as in decoding."""
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
        """Wait until the ring buffer is full, that is, until no byte has moved for a while."""
        start = changed = time.perf_counter()
        before = self.bytes_transferred
        while (now := time.perf_counter()) - changed < _QUIET_SECONDS and now - start < limit:
            time.sleep(_QUIET_SECONDS / 10)
            if self.bytes_transferred != before:
                before, changed = self.bytes_transferred, time.perf_counter()


def run_window(
    passes: PassRunner,
    tokens: int,
    seconds: float,
    read_link: Callable[[], float],
    floor: Callable[[int], Compute],
) -> Window:
    """Measure the ceiling, run one uncounted pass, then at least two passes and `seconds`, and measure again.

    The link is measured right before and right after the passes. A disk that was idle while the processor was
    measured may be faster for a moment than it can sustain (shared disks accumulate credit), so the first
    measurement is made twice and the second one is used.
    """
    compute = floor(tokens)
    passes.settle()
    read_link()
    before = Reading(read_link(), compute)
    passes.run(tokens)
    start, moved, waited, done = time.perf_counter(), passes.bytes_transferred, passes.waited, 0
    while (spent := time.perf_counter() - start) < seconds or done < 2:
        passes.run(tokens)
        done += 1
    moved, waited = passes.bytes_transferred - moved, passes.waited - waited
    passes.settle()
    return Window(tokens, done, spent, moved, waited, before, Reading(read_link(), floor(tokens)))


def run_rounds(
    args: argparse.Namespace,
    passes: PassRunner,
    read_link: Callable[[], float],
    floor: Callable[[int], Compute],
    report: Report,
) -> list[Window]:
    """Run windows of all numbers of tokens in turn, for several rounds."""
    windows: list[Window] = []
    for turn in range(args.rounds):
        for tokens in args.tokens:
            window = run_window(passes, tokens, args.seconds, read_link, floor)
            windows.append(window)
            now = window.figures()
            report.progress(
                f"round {turn + 1}, {tokens} tokens: {now['seconds']:.3f} s per pass, link "
                f"{format_bytes(now['link_bytes_per_s'])}/s, utilization {now['utilization']:.2f}, of bound "
                f"{now['of_bound']:.2f}"
            )
    return windows


def summarize(windows: Sequence[Window]) -> dict[str, Any]:
    """Return medians, minimum and maximum over the windows of one number of tokens; seconds are per pass."""
    each = [window.figures() for window in windows]
    figures = {name: [found[name] for found in each] for name in each[0]}
    alone = [found["link_seconds"] * window.passes for found, window in zip(each, windows, strict=True)]
    return {
        "tokens": windows[0].tokens,
        "windows": len(windows),
        "passes": sum(window.passes for window in windows),
        **{name: statistics.median(values) for name, values in figures.items()},
        # All windows as one: drift that the measurements missed cancels out, unlike in a median.
        "pooled_utilization": ratio(sum(alone), sum(window.seconds for window in windows)),
        "spread": {name: [min(values), max(values)] for name, values in figures.items()},
    }


def summarize_all(windows: list[Window]) -> list[dict[str, Any]]:
    """Return a summary for each number of tokens, in order."""
    counts = sorted({window.tokens for window in windows})
    return [summarize([window for window in windows if window.tokens == count]) for count in counts]
