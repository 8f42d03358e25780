"""Trying a loaded model: what its passes take on this machine, in a few seconds.

A pass over a large model takes a minute, so a trial breaks it off as soon as enough layers have run. What it
has measured is the layers as they will run: over their own weights, with the reading threads at work beside
them.
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
from offspec.sampling.verify import LikelyRows, walk
from offspec.stream.device_experts import DeviceExpertStore
from offspec_planners.cost import ModelSizes
from offspec_planners.hardware_rates import Hardware, Processor, Rate
from offspec_planners.measure import identify
from offspec_planners.measure.disk import disk_rate
from offspec_planners.measured_costs import MeasuredCosts

ROWS = (2, 16, 64, 128, 256, 512)
FEW_ROWS = (1, 4)  # as well, where every row asks for experts of its own
# Committed positions in front of passes that are measured: a prompt and an answer. More than the keys that
# attention meets one by one, or what it does with all others would have no price.
_PREFIX = 512

_SECONDS = 0.7  # that passes of a row count are given in all, before they are broken off
_ROUNDS = 2  # in which that is given, where layers are fast enough
_LEAST_LAYERS = 3
_WALKS = 7
_COPIED, _COPIES = 4 << 20, 5
_UNPACKING = 3.5  # times what copying takes, by `bench.kernels.dequant`: NF4 on a CPU
_LINK_SECONDS, _READINGS = 1.5, 3  # of reading, to know how fast the link is
_BUSY = 0.2  # share of that time that passes must wait for the link to call it busy

Progress = Callable[[int, int], None]


class EnoughError(Exception):
    """The pass has run for long enough."""


class PassTrial:
    """Tries passes over a loaded target.

    Args:
        target: Loaded; its cache is empty before and after.
        ids: Text to run, for embeddings of real tokens.
        capacity: Positions of the cache.
        temperature: Of the tokens that are chosen.
        look: Called between layers.
    """

    def __init__(
        self,
        target: LoadedModel,
        ids: Sequence[int],
        capacity: int,
        temperature: float = 0.0,
        look: Callable[[], None] | None = None,
    ) -> None:
        self._look = look
        self._temperature = temperature
        self._target, self._ids = target, list(ids) or [0]
        room = min(capacity, target.skeleton.context_length)
        self._prefix = min(_PREFIX, room // 2)
        wanted = ROWS if target.store is None else sorted((*ROWS, *FEW_ROWS))
        self._rows = [rows for rows in wanted if self._prefix + rows <= room] or [1]

    @torch.no_grad()
    def measure(self, progress: Progress, seconds: float = _SECONDS) -> MeasuredCosts:
        """Passes of several row counts, the link, and the walk. Nothing is left in the target's cache."""
        target = self._target
        layer, outside, cpu = (list[tuple[int, float]]() for _ in range(3))
        target.tree_model.between = self._look
        try:
            # The first layers that run at all make what later ones find made. Of a large model no row count
            # has a second pass, so that the price of the fewest rows would be of that.
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
                rising(layer),
                tuple((rows, around + head) for rows, around in sorted(outside)),
                self._walk(),
                link=link,
                gpus=len(target.devices),
                unpack=unpack,
                cpu=tuple(sorted(cpu)),
                disk=disk,
            )
        finally:
            target.tree_model.settle = None
            target.tree_model.on_layer = target.tree_model.between = None
            target.recover()
            target.tree_model.cache.rewind(0)

    def _rounds(self, progress: Progress, seconds: float) -> dict[int, tuple[float, ...]]:
        """What `_pass` says of each row count, in rounds over all of them, of which the lesser times count.

        What goes on beside it for a second makes passes longer. If all passes of one row count met with that,
        trees of that size would seem to cost as much as larger ones, which a plan would take instead.
        """
        # Experts may still be read ahead: the fewest rows, whose price matters most, come last.
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
        """Bytes per second while passes of two rows wait for weights; None where nothing streams."""
        if self._target.ring_stats.bytes_moved == 0:
            return None
        waited = self._target.ring_stats.wait_seconds
        rates = [self._rate() for _ in range(_READINGS)]
        waited = self._target.ring_stats.wait_seconds - waited
        if self._target.device.type == "cpu" and waited < _BUSY * _LINK_SECONDS:
            return read_rate(self._target)  # the ring stood full, and told nothing of the disk
        return Rate.of(rates)

    def _rate(self) -> float:
        moved, began = self._target.ring_stats.bytes_moved, time.perf_counter()
        self._pass(2, _LINK_SECONDS / _READINGS)
        return (self._target.ring_stats.bytes_moved - moved) / (time.perf_counter() - began)

    def _pass(self, rows: int, seconds: float) -> tuple[float, float, float]:
        """Seconds of one layer, of a pass around its layers, and of a layer of the CPU beside a GPU.

        The medians of as many as there is time for; of the last 0 where no such layer ran.

        Of several passes the first, which makes what later ones find made, does not count.
        """
        tried, began = list[tuple[float, float, float]](), time.perf_counter()
        while not tried or time.perf_counter() - began < seconds:
            tried.append(self._one(rows, seconds))
        counted = tried[1:] or tried
        each, around, beside = map(statistics.median, zip(*counted, strict=True))
        return each, around, beside

    def _one(self, rows: int, seconds: float) -> tuple[float, float, float]:
        """The same of one pass, which is broken off when it has run that long."""
        model, device = self._target.tree_model, self._target.device
        self._pretend()
        tokens = torch.tensor([self._ids[i % len(self._ids)] for i in range(rows)], device=device)
        context = TreeContext(
            prefix=self._prefix,
            position=torch.arange(self._prefix, self._prefix + rows, device=device),
            causal=0,
            ancestors=_ancestors(rows),
        )
        if device.type == "cuda":
            model.settle = self._settle
        began = time.perf_counter()

        def stop(done: int) -> None:
            if done >= _LEAST_LAYERS and time.perf_counter() - began > seconds:
                raise EnoughError

        model.on_layer = stop
        hidden: torch.Tensor | None = None
        with suppress(EnoughError):
            hidden = model.hidden(tokens, context)
            if model.settle is not None:
                model.settle()
        spent = model.spent
        around = max(time.perf_counter() - began - spent.computed - spent.waited, 0.0)
        if hidden is None:
            self._target.recover()
        elif model.streams_head:
            model.logits(hidden[:2])  # or the ring would be out of step
        on_device = spent.layers - spent.cpu_layers
        beside = spent.cpu_computed / spent.cpu_layers if spent.cpu_layers else 0.0
        return (spent.computed - spent.cpu_computed) / on_device if on_device else beside, around, beside

    def _settle(self) -> None:
        """Wait for what all GPUs compute, and not for copies of later layers, which go on in passes too."""
        for gpu in self._target.devices:
            torch.cuda.current_stream(gpu).synchronize()

    def _pretend(self) -> None:
        """Make the cache as long as after a prompt. What it holds is of no interest."""
        cache = self._target.tree_model.cache
        for rows in cache.rows:
            rows.cut(self._prefix)
        cache.length = self._prefix

    def _head(self) -> float:
        """Seconds of the product that makes the logits of the likeliest nodes; 0 where there is none such."""
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
        """Seconds of choosing one token, with the noise at hand, as it is where the draft has used it."""
        target, vocabulary = self._target, self._target.skeleton.vocab_size
        none = torch.zeros(1, vocabulary, device=target.device)
        processor = LogitsProcessor(SamplingParams(self._temperature), vocabulary, [], target.device)
        noise = GumbelNoise(0, vocabulary, target.device) if self._temperature else None
        times, tree = [], TokenTree.single(0)
        for _ in range(_WALKS):
            began = time.perf_counter()
            rows = LikelyRows(tree, lambda nodes: none, 1)
            walk(tree, rows, processor, noise, 0, lambda token: True)
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def _least(times: Sequence[float]) -> float:
    """Of those that were taken; 0 where none was."""
    return min((seconds for seconds in times if seconds), default=0.0)


def rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) by rows, made to rise: what fewer rows took beyond more of them was something else."""
    found, least = list[tuple[int, float]](), math.inf
    for rows, seconds in sorted(points, reverse=True):
        least = min(least, seconds)
        found.append((rows, least))
    return tuple(reversed(found))


def copying_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds that copying one value of a matrix takes.

    Unpacking itself is not tried, because what it needs would stay in memory.
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
    """Bytes per second that the disk gives of a model's own files. Raises StreamError."""
    try:
        return disk_rate(target.weight_files)
    except OSError as error:
        file = error.filename or target.weight_files[0]
        raise StreamError(f"reading failed: {error.strerror or error}", file=file, offset=0) from error


def copy_rate(store: DeviceExpertStore) -> Rate:
    """Bytes per second from pinned RAM to a device, in copies of an expert."""
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


def tried_machine(target: LoadedModel, measured: MeasuredCosts, sizes: ModelSizes) -> Hardware:
    """A profile of this machine as far as the trial of one model tells it.

    Products are whole layers, attention and all; memory is as fast as a layer of two rows fetched its
    weights; the disk is the link of the trial, or a short reading of the model's files.
    """
    which = identify(str(target.device))
    fetched = sizes.weights * target.dtype.itemsize / measured.layer[0][1]
    products = tuple((rows, 2.0 * sizes.weights * rows / seconds) for rows, seconds in measured.layer)
    processor = Processor(which.processor, which.memory, Rate.exactly(fetched), products, 0.0)
    disk = measured.link or measured.disk or read_rate(target)
    link = measured.link if which.apart else None
    return Hardware(which.name, which.ram, disk, link, processor, host=measured.host)


def _ancestors(rows: int) -> torch.Tensor:
    """[rows, rows] bool of a tree in which node i hangs from node (i - 1) // 2."""
    sees = torch.eye(rows, dtype=torch.bool)
    for node in range(1, rows):
        sees[node] |= sees[(node - 1) // 2]
    return sees
