"""Benchmark of a loaded model: time of its passes on this machine, in a few seconds.

A pass of a large model may take a minute, so a benchmark stops it as soon as enough layers have run. It
measures the layers under real conditions: with their own weights, and with the reading threads running.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from offspec.core.config import SamplingParams
from offspec.core.errors import StreamError
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import TokenTree
from offspec.sampling.verify import LazyLogits, verify_tree
from offspec.stream.device_expert_store import DeviceExpertStore
from offspec_planners.cost import ModelSizes
from offspec_planners.hardware_rates import Hardware, Processor, Rate
from offspec_planners.measure import identify
from offspec_planners.measure.disk import disk_rate
from offspec_planners.measured_costs import MeasuredCosts

ROWS = (2, 16, 64, 128, 256, 512)
FEW_ROWS = (1, 4)  # also measured if every row needs its own experts
# Committed positions before measured passes: a prompt and an answer. More than the keys that
# attention processes one by one, so that its block-wise part is measured too.
_PREFIX = 512

_SECONDS = 0.7  # total seconds for the passes of a row count, before they are stopped
_ROUNDS = 2  # seconds within which that is spent, if layers are fast enough
_LEAST_LAYERS = 3
_WALKS = 7
_COPIED, _COPIES = 4 << 20, 5
_UNPACKING = 3.5  # multiple of the time of copying, by `bench.kernels.dequant`: NF4 on a CPU
_LINK_SECONDS, _READINGS = 1.5, 3  # of reading, to measure the link
_BUSY = 0.2  # share of that time that passes must wait for the link to call it busy

Progress = Callable[[int, int], None]


class StopPass(Exception):
    """Raised to stop a pass that has run for long enough."""


class PassBenchmark:
    """Runs test passes over a loaded target.

    Args:
        target: The loaded target; its cache is empty before and after.
        ids: Text to run, for embeddings of real tokens.
        capacity: Positions of the cache.
        temperature: Sampling temperature.
        check_contention: Called between layers.
    """

    def __init__(
        self,
        target: LoadedModel,
        ids: Sequence[int],
        capacity: int,
        temperature: float = 0.0,
        check_contention: Callable[[], None] | None = None,
    ) -> None:
        self._look = check_contention
        self._temperature = temperature
        self._target, self._ids = target, list(ids) or [0]
        room = min(capacity, target.skeleton.context_length)
        self._prefix = min(_PREFIX, room // 2)
        wanted = ROWS if target.store is None else sorted((*ROWS, *FEW_ROWS))
        self._rows = [rows for rows in wanted if self._prefix + rows <= room] or [1]

    @torch.no_grad()
    def measure(self, progress: Progress, seconds: float = _SECONDS) -> MeasuredCosts:
        """Measure passes of several row counts, the link, and verification. Leaves the target's cache
        empty.
        """
        target = self._target
        layer, outside, cpu = (list[tuple[int, float]]() for _ in range(3))
        target.tree_model.check_cancelled = self._look
        try:
            # The first layers that run do one-time work. For a large model no row count has a second
            # pass, so that the cost of the smallest row count would include it.
            self._one(self._rows[0], 0.0)
            for rows, (each, around, beside) in self._rounds(progress, seconds).items():
                layer.append((rows, each))
                outside.append((rows, around))
                cpu += [(rows, beside)] if beside else []
            link = self.link()
            progress(len(self._rows) + 1, len(self._rows) + 1)
            disk = read_rate(target) if target.store is not None else None
            unpack = 0.0 if target.is_packed else _UNPACKING * copying_seconds(target.dtype, target.device)
            head = self._head()
            return MeasuredCosts(
                make_monotonic(layer),
                tuple((rows, around + head) for rows, around in sorted(outside)),
                self._walk(),
                link=link,
                gpus=len(target.devices),
                unpack=unpack,
                cpu=tuple(sorted(cpu)),
                disk=disk,
            )
        finally:
            target.tree_model.synchronize = None
            target.tree_model.on_layer = target.tree_model.check_cancelled = None
            target.recover()
            target.tree_model.cache.rewind(0)

    def _rounds(self, progress: Progress, seconds: float) -> dict[int, tuple[float, ...]]:
        """Measure each row count with `_pass`, in rounds over all of them, and keep the smaller times.

        Other processes that run for a second slow passes down. If that affected all passes of one row count,
        trees of that size would seem to cost as much as larger ones, and a plan would prefer those.
        """
        # Experts may still be prefetched: the smallest row counts, whose cost matters most, come last.
        order = self._rows if self._target.store is None else self._rows[::-1]
        found, began = dict[int, list[tuple[float, ...]]](), time.perf_counter()
        for turn in range(_ROUNDS):
            if turn and time.perf_counter() - began >= seconds * len(order):
                break
            for done, rows in enumerate(order):
                if not turn:
                    progress(done, len(order) + 1)
                found.setdefault(rows, []).append(self._pass(rows, seconds / _ROUNDS))
        return {rows: tuple(map(_least, zip(*tried, strict=True))) for rows, tried in found.items()}

    def link(self) -> Rate | None:
        """Return bytes per second while passes of two rows wait for weights; None if nothing streams."""
        if self._target.ring_stats.bytes_moved == 0:
            return None
        waited = self._target.ring_stats.wait_seconds
        rates = [self._rate() for _ in range(_READINGS)]
        waited = self._target.ring_stats.wait_seconds - waited
        if self._target.device.type == "cpu" and waited < _BUSY * _LINK_SECONDS:
            return read_rate(self._target)  # the ring buffer was full, which shows nothing about the disk
        return Rate.of(rates)

    def _rate(self) -> float:
        moved, began = self._target.ring_stats.bytes_moved, time.perf_counter()
        self._pass(2, _LINK_SECONDS / _READINGS)
        return (self._target.ring_stats.bytes_moved - moved) / (time.perf_counter() - began)

    def _pass(self, rows: int, seconds: float) -> tuple[float, float, float]:
        """Return seconds of a layer, of a pass outside its layers, and of a layer on the CPU next to a GPU.

        Each is the median of the passes that fit the time; the last is 0 if no such layer ran. The first of
        several passes does not count, since it does one-time work.
        """
        tried, began = list[tuple[float, float, float]](), time.perf_counter()
        while not tried or time.perf_counter() - began < seconds:
            tried.append(self._one(rows, seconds))
        counted = tried[1:] or tried
        each, around, beside = map(statistics.median, zip(*counted, strict=True))
        return each, around, beside

    def _one(self, rows: int, seconds: float) -> tuple[float, float, float]:
        """Measure one pass, which is stopped after that many seconds; returns the same as `_pass`."""
        model, device = self._target.tree_model, self._target.device
        self._fake_prefix()
        tokens = torch.tensor([self._ids[i % len(self._ids)] for i in range(rows)], device=device)
        context = TreeContext(
            prefix=self._prefix,
            position=torch.arange(self._prefix, self._prefix + rows, device=device),
            causal=0,
            ancestors=_ancestors(rows),
        )
        if device.type == "cuda":
            model.synchronize = self._synchronize
        began = time.perf_counter()

        def stop(done: int) -> None:
            if done >= _LEAST_LAYERS and time.perf_counter() - began > seconds:
                raise StopPass

        model.on_layer = stop
        hidden: torch.Tensor | None = None
        with suppress(StopPass):
            hidden = model.hidden(tokens, context)
            if model.synchronize is not None:
                model.synchronize()
        spent = model.pass_time
        around = max(time.perf_counter() - began - spent.computed - spent.waited, 0.0)
        if hidden is None:
            self._target.recover()
        elif model.streams_head:
            model.logits(hidden[:2])  # otherwise the ring buffer would be out of step
        on_device = spent.layers - spent.cpu_layers
        beside = spent.cpu_computed / spent.cpu_layers if spent.cpu_layers else 0.0
        return (spent.computed - spent.cpu_computed) / on_device if on_device else beside, around, beside

    def _synchronize(self) -> None:
        """Wait for the computation of all GPUs, but not for copies of later layers, which overlap in real
        passes too.
        """
        for gpu in self._target.devices:
            torch.cuda.current_stream(gpu).synchronize()

    def _fake_prefix(self) -> None:
        """Fill the cache to its length after a prompt; the contents do not matter."""
        cache = self._target.tree_model.cache
        for rows in cache.rows:
            rows.truncate(self._prefix)
        cache.length = self._prefix

    def _head(self) -> float:
        """Return seconds of computing the logits of the likeliest nodes; 0 if there are none."""
        target, model = self._target, self._target.tree_model
        if model.streams_head:
            return 0.0
        rows, width, times = model.rows_together(target.device), target.skeleton.config.hidden_size, []
        states = torch.zeros(rows, width, dtype=target.dtype, device=target.device)
        for _ in range(_WALKS):
            began = time.perf_counter()
            float(model.logits_by_row(states)(range(rows))[0, 0])  # waits for a device
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _walk(self) -> float:
        """Return seconds of choosing one token, with its noise already computed, as after drafting."""
        target, vocabulary = self._target, self._target.skeleton.vocab_size
        none = torch.zeros(1, vocabulary, device=target.device)
        processor = LogitsProcessor(SamplingParams(self._temperature), vocabulary, [], target.device)
        noise = GumbelNoise(0, vocabulary, target.device) if self._temperature else None
        times, tree = [], TokenTree.single(0)
        for _ in range(_WALKS):
            began = time.perf_counter()
            rows = LazyLogits(tree, lambda nodes: none, 1)
            verify_tree(tree, rows, processor, noise, 0, lambda token: True)
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def _least(times: Sequence[float]) -> float:
    """Return the smallest time; 0 if there is none."""
    return min((seconds for seconds in times if seconds), default=0.0)


def make_monotonic(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Make (rows, seconds) monotonic: extra time of fewer rows than another measurement had other causes."""
    found, least = list[tuple[int, float]](), math.inf
    for rows, seconds in sorted(points, reverse=True):
        least = min(least, seconds)
        found.append((rows, least))
    return tuple(reversed(found))


def copying_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return seconds to copy one value of a matrix.

    Unpacking itself is not measured, because its workspace would stay allocated.
    """
    source = torch.zeros(_COPIED, dtype=dtype, device=device)
    copy, times = torch.empty_like(source), list[float]()
    for _ in range(_COPIES):
        began = time.perf_counter()
        copy.copy_(source)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / _COPIED


def read_rate(target: LoadedModel) -> Rate:
    """Return bytes per second when reading a model's own files from the disk. Raises StreamError."""
    try:
        return disk_rate(target.weight_files)
    except OSError as error:
        file = error.filename or target.weight_files[0]
        raise StreamError(f"reading failed: {error.strerror or error}", file=file, offset=0) from error


def copy_rate(store: DeviceExpertStore) -> Rate:
    """Return bytes per second from pinned RAM to a device, in copies of one expert."""
    source = torch.empty(store.slot_bytes, dtype=torch.uint8, pin_memory=True)
    target, rates = torch.empty_like(source, device=store.device), list[float]()
    stream = torch.cuda.current_stream(store.device)
    for _ in range(1 + _COPIES):
        stream.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        stream.synchronize()
        rates.append(len(source) / max(time.perf_counter() - began, 1e-9))
    return Rate.of(rates[1:])


def measured_hardware(target: LoadedModel, measured: MeasuredCosts, sizes: ModelSizes) -> Hardware:
    """Return a profile of this machine derived from the benchmark of one model.

    Matrix product speed is that of whole layers including attention; memory speed is that of a two-row layer
    reading its weights; disk speed is the measured link, or a short test read of the model's files.
    """
    which = identify(str(target.device))
    fetched = sizes.weights * target.dtype.itemsize / measured.layer[0][1]
    products = tuple((rows, 2.0 * sizes.weights * rows / seconds) for rows, seconds in measured.layer)
    processor = Processor(which.processor, which.memory, Rate.exactly(fetched), products, 0.0)
    disk = measured.link or measured.disk or read_rate(target)
    link = measured.link if which.has_own_memory else None
    return Hardware(which.name, which.ram, disk, link, processor, host=measured.host)


def _ancestors(rows: int) -> torch.Tensor:
    """Return the ancestor mask [rows, rows] bool of a tree in which node (i - 1) // 2 is the parent of
    node i.
    """
    sees = torch.eye(rows, dtype=torch.bool)
    for node in range(1, rows):
        sees[node] |= sees[(node - 1) // 2]
    return sees
