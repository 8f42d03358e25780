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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.lib.report import Report, ratio
from bench.stream.floor import Compute, synchronize
from offspec_planners.units import format_bytes

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

    def figures(self) -> dict[str, float]:
        """Of one pass: its seconds and bytes, those of the link and the processor alone by the readings on
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
            "utilisation": ratio(alone, seconds),
            "of_bound": ratio(max(alone, compute.gemm), seconds),
            "of_bound_with_attention": ratio(max(alone, compute.gemm + compute.attention), seconds),
        }

    def to_json(self) -> dict[str, Any]:
        """The window as it was, and its shares of the ceiling."""
        figures = self.figures()
        return {**asdict(self), **{name: figures[name] for name in ("utilisation", "of_bound")}}


class Passes:
    """Runs passes of random text, always the same, through a loaded target, each from an empty cache."""

    def __init__(self, target: LoadedModel, *, head: bool = False) -> None:
        """head: also ask for one row of logits, which a head that streams needs to stay in step."""
        import torch

        self.target, self._head = target, head
        self._random = torch.Generator().manual_seed(0)

    @property
    def moved(self) -> int:
        """Bytes over the link that is computed from."""
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
            now = window.figures()
            report.progress(
                f"round {turn + 1}, {tokens} tokens: {now['seconds']:.3f} s a pass, link "
                f"{format_bytes(now['link_bytes_per_s'])}/s, in use {now['utilisation']:.2f}, of bound "
                f"{now['of_bound']:.2f}"
            )
    return windows


def summarise(windows: Sequence[Window]) -> dict[str, Any]:
    """Medians over windows of one number of tokens, with the least and the most; seconds are a pass's."""
    each = [window.figures() for window in windows]
    figures = {name: [found[name] for found in each] for name in each[0]}
    alone = [found["link_seconds"] * window.passes for found, window in zip(each, windows, strict=True)]
    return {
        "tokens": windows[0].tokens,
        "windows": len(windows),
        "passes": sum(window.passes for window in windows),
        **{name: statistics.median(values) for name, values in figures.items()},
        # All windows as one: drift that the readings missed cancels out, which it need not in a median.
        "pooled_utilisation": ratio(sum(alone), sum(window.seconds for window in windows)),
        "spread": {name: [min(values), max(values)] for name, values in figures.items()},
    }


def summarise_all(windows: list[Window]) -> list[dict[str, Any]]:
    """A summary for each number of tokens, in order."""
    counts = sorted({window.tokens for window in windows})
    return [summarise([window for window in windows if window.tokens == count]) for count in counts]
