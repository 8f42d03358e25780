"""Cost of a pass: from bytes, FLOPs and measured points to seconds, accounting for overlap.

Three activities make up an iteration. The draft runs, then the target computes; concurrently with both, the
link loads weights into a ring of slots. The link may run ahead of the computation by at most the ring's
slots, so in steady state an iteration takes the longest of

    draft + compute        the processor is never idle
    link                   the link is never idle
    draft + rest + edge    the ring filled up during drafting, and the link became idle

Experts missed by a pass are known only after its routers have run, so none of them can be loaded ahead: their
time is added to the link's, and the part not overlapped by computing other experts is added to the pass's;
see `expert_costs`.

`rest` is the link time of everything that streams and does not fit in the ring. `edge` is the time of
computing before the link resumes and after the last unit has arrived: see `transfer.crossing_seconds`. Tests
check these formulas against a slot-by-slot simulation of the ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offspec_planners.expert_costs import ExpertCosts, ExpertSizes
from offspec_planners.hardware_rates import Hardware, Processor, Rate
from offspec_planners.json_fields import Number, Points, Share
from offspec_planners.placement import Placement, Tier
from offspec_planners.transfer import (
    Links,
    cache_seconds,
    expert_sources,
    exposed_layers,
    slowest_transfer_seconds,
    streamed_units,
)

# Row counts at which compute is tabulated from a hardware profile; between them it is piecewise linear.
ROWS = (1, 2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
WIDTHS = (1, 4, 8, 16, 32, 64, 128)
PROMPT_ROWS = 1024  # prompt rows in a pass shared by several sequences
JOINED_WIDTHS = (*WIDTHS, 256, 512, 1024, 2048)  # widths of draft steps shared by several sequences

_ATTENTION_SHARE = 0.3  # rate of masked attention relative to a product
_FULL = 64  # minimum rows for a compute-bound product
_RANKING = 6  # number of reads and writes of a draft's logits while ranking children
_HOP = 5e-5  # seconds of a blocking copy of a few rows between devices or to RAM
_HOPPED = 5e9  # bytes per second of such copies from unpinned memory
_LEFT = 0.25  # minimum share of RAM bandwidth left to the CPU by a link
_IDLE = 1.25  # ratio of link to compute seconds from which the processor counts as idle
_STEP_OVERHEAD = 1e-3  # seconds of a step on the host: choosing nodes, placing their children


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes and arithmetic of a model.

    Args:
        name: For error messages and plans.
        layers: Bytes of each decoder layer, experts included, as streamed or resident.
        weights: Weights of one layer that each row is multiplied by; of the experts, only the chosen ones.
        head: Bytes of the output head.
        head_weights: Weights of the output head.
        kv_per_token: Bytes of KV cache per position over all layers.
        attention: FLOPs of one layer for each pair of row and key.
        hidden: Size of the hidden states.
        vocabulary: Number of tokens in the vocabulary.
        unpacked: Values of a layer that every pass dequantizes, excluding experts.
        unpacked_bytes: Stored bytes of these values.
        experts: Routed experts; None for a model without.
    """

    name: str
    layers: tuple[int, ...]
    weights: int
    head: int
    head_weights: int
    kv_per_token: int
    attention: int
    hidden: int
    vocabulary: int
    unpacked: float = 0.0
    unpacked_bytes: float = 0.0
    experts: ExpertSizes | None = None

    def packed_in(self, bits: float, stored: float = 16.0) -> "ModelSizes":
        """Return sizes with quantized layers; weights now take `stored` bits."""
        values = 8 / stored * sum(self.dense_layers) / len(self.layers)
        layers = tuple(int(size * bits / stored) for size in self.layers)
        experts = self.experts
        if experts is not None:
            experts = replace(experts, nbytes=int(experts.nbytes * bits / stored), unpacked=experts.weights)
        packed = replace(self, layers=layers, unpacked=values, unpacked_bytes=values * bits / 8)
        return replace(packed, experts=experts)

    def unpacked_once(self) -> "ModelSizes":
        """Return sizes with the weights dequantized once, at load time."""
        experts = None if self.experts is None else replace(self.experts, unpacked=0.0)
        return replace(self, unpacked=0.0, unpacked_bytes=0.0, experts=experts)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Bytes of each layer without its experts."""
        if self.experts is None:
            return self.layers
        aside = dict.fromkeys(self.experts.layers, self.experts.layer_bytes)
        return tuple(max(size - aside.get(layer, 0), 0) for layer, size in enumerate(self.layers))

    @property
    def dense_weights(self) -> int:
        """Average number of weights of one layer that every row is multiplied by, experts excluded."""
        if self.experts is None:
            return self.weights
        chosen = self.experts.chosen * self.experts.weights * len(self.experts.layers)
        return max(self.weights - chosen // len(self.layers), 0)

    def streamed_with(self, placement: Placement) -> tuple[int, ...]:
        """Return the bytes streamed for each layer, without experts if they are loaded on demand."""
        return self.dense_layers if placement.on_demand_experts else self.layers

    @property
    def parameters(self) -> int:
        """Number of weights that a row is multiplied by, head included."""
        return self.weights * len(self.layers) + self.head_weights


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of a pass and of draft steps, as functions of their rows and widths.

    Curves are piecewise linear and continued by their last slope.

    Args:
        compute: (rows, seconds) of layers, head and verification, rows ascending.
        step: (width, seconds) of a draft step, widths ascending.
        start: Seconds of the draft in every pass in addition to its steps.
        link: Seconds to transfer everything that streams over the slowest link.
        rest: Seconds of `link` that cannot run ahead of a pass.
        edge: (rows, seconds) of compute that no transfer overlaps if the ring is full when a pass begins.
        experts: Costs of on-demand experts; None without any.
        caches: Seconds of `link`, and of `rest`, to transfer the KV cache of a sequence.
        hidden: Share of a draft's seconds that overlap the previous pass, if `is_transfer_bound`.
    """

    compute: Points
    step: Points
    start: Number = 0.0
    link: Number = 0.0
    rest: Number = 0.0
    edge: Points = ((1, 0.0),)
    experts: ExpertCosts | None = None
    caches: Number = 0.0
    hidden: Share = 0.0

    def for_sequences(self, count: int) -> "PassCosts":
        """Return the costs of passes and draft steps shared equally by `count` sequences.

        A pass of all their rows costs the same as a pass of one sequence with that many rows, and likewise
        for draft steps; per-sequence costs are multiplied.
        """
        if count == 1:
            return self
        more = (count - 1) * self.caches
        experts = None if self.experts is None else self.experts.for_sequences(count)
        link, rest = self.link + more, self.rest + more
        return replace(self, start=count * self.start, link=link, rest=rest, experts=experts, hidden=0.0)

    def with_steps(self, factor: float) -> "PassCosts":
        """Return these costs with draft steps that take `factor` times as long."""
        return replace(self, step=tuple((width, factor * seconds) for width, seconds in self.step))

    def behind(self, rows: int) -> "PassCosts":
        """Return the costs for a tree in a pass that also processes `rows` rows of a prompt.

        A node costs the additional time of the pass. The benefit of tokens is the later passes saved, each of
        which costs at least as much as a pass of a single row.
        """
        corners = {count for count, _ in self.compute}
        every = {1, *corners, *(count - rows for count in corners)}
        nodes = np.array(sorted(count for count in every if count >= 1))
        alone, first = self.iteration(0.0, 1), self.pass_seconds(rows + 1)
        seconds = alone + np.maximum.accumulate(np.maximum(self.pass_seconds(rows + nodes) - first, 0.0))
        points = tuple(zip(nodes.tolist(), seconds.tolist(), strict=True))
        return PassCosts(points, self.step, self.start)

    def compute_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return seconds of a pass of `rows` rows with its weights in place."""
        return _piecewise(self.compute, rows)

    def link_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return seconds to transfer everything a pass of `rows` rows needs over the slowest link."""
        if self.experts is None:
            return np.full(np.shape(rows), self.link)
        return self.experts.link_seconds(rows, self.link)

    def step_seconds(self, width: ArrayLike) -> NDArray[np.float64]:
        """Return seconds of a draft step that expands `width` nodes."""
        return _piecewise(self.step, width)

    def draft_seconds(self, widths: Sequence[int]) -> float:
        """Return seconds of growing a tree in steps of these widths; 0 without steps."""
        if not len(widths):
            return 0.0
        return self.start + float(self.step_seconds(np.asarray(widths)).sum())

    def pass_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return seconds of a pass of `rows` rows after a draft during which the ring could fill."""
        compute, filling = self.compute_seconds(rows), self.rest + _piecewise(self.edge, rows)
        if self.experts is None:
            return np.maximum(compute, filling)
        come = self.experts.link_seconds(rows, self.rest) - self.rest
        return np.maximum(compute + self.experts.wait_seconds(rows), filling + come)

    def iteration(self, draft: float | NDArray[np.float64], rows: ArrayLike) -> NDArray[np.float64]:
        """Return seconds of drafting for `draft` seconds and verifying `rows` rows, in steady state."""
        left = draft * self.exposed_share(rows)
        return np.asarray(np.maximum(left + self.pass_seconds(rows), self.link_seconds(rows)), np.float64)

    def exposed_share(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the share of a draft's seconds that passes of `rows` rows do not overlap."""
        return np.where(self.is_transfer_bound(rows), 1.0 - self.hidden, 1.0)

    def is_transfer_bound(self, rows: ArrayLike) -> NDArray[np.bool_]:
        """Return whether a pass of `rows` rows waits for weights long enough to overlap drafting."""
        return np.asarray(self.link_seconds(rows) >= _IDLE * self.compute_seconds(rows))

    def bound(self, draft: float, rows: int) -> str:
        """Return the bottleneck of an iteration: "link", "compute", or "draft" if longer than compute."""
        compute = float(self.compute_seconds(rows))
        draft *= float(self.exposed_share(rows))
        if float(np.maximum(draft + self.pass_seconds(rows), self.link_seconds(rows))) > draft + compute:
            return "link"
        return "draft" if draft > compute else "compute"


class Pricing(Protocol):
    """Source of pass costs under any placement: measured parts, or a hardware profile.

    knows_cpu: whether this includes placements with layers or experts computed by a CPU next to a device.
    """

    @property
    def knows_cpu(self) -> bool: ...

    def costs(self, target: ModelSizes, placement: Placement, walked: float) -> PassCosts:
        """Return the costs of passes; walked: average number of nodes walked per pass."""

    def with_faster_link(self, factor: float) -> "Pricing":
        """Return these costs with bandwidth multiplied by a factor."""

    def with_packed_draft(self, bits: int) -> "Pricing | None":
        """Return these costs with the draft's weights quantized to `bits`; None if unknown."""


def _piecewise(points: Points, at: ArrayLike) -> NDArray[np.float64]:
    """Interpolate linearly between the points; flat below the first, continued by the last slope above."""
    x, y = _columns(points)
    wanted = np.asarray(at, np.float64)
    found = np.interp(wanted, x, y)
    if len(x) > 1:
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        found = found + np.maximum(wanted - x[-1], 0.0) * max(slope, 0.0)
    return np.asarray(found, np.float64)


@lru_cache(maxsize=64)
def _columns(points: Points) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points as arrays, cached because they are read far more often than they change."""
    return np.array([x for x, _ in points], np.float64), np.array([y for _, y in points], np.float64)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs of passes estimated from a machine's profile alone.

    Args:
        hardware: Profile of the machine.
        draft: Sizes of the draft; None without one.
        packed: Bits of the draft's quantized weights; None if they are not quantized.
        prefix: Committed positions that attention covers.
        unpacks: Whether quantized draft weights are dequantized on each use, not multiplied directly.
        widths: Widths at which draft steps are tabulated.
    """

    hardware: Hardware
    draft: ModelSizes | None
    packed: int | None = None
    prefix: int = 128
    unpacks: bool = True
    widths: tuple[int, ...] = WIDTHS

    @property
    def knows_cpu(self) -> bool:
        """Implements `Pricing`."""
        return self.hardware.host is not None

    def costs(self, target: ModelSizes, placement: Placement, walked: float) -> PassCosts:
        """Implements `Pricing`."""
        step, start = [(1, 0.0)], 0.0
        if self.draft is not None:
            step = [
                (width, draft_step(self.hardware.processor, self.draft, width, self.packed, self.unpacks))
                for width in self.widths
            ]
            start = step[2][1] - step[0][1]  # the last committed tokens are processed with the root
        layers, links = target.streamed_with(placement), self._links()
        units = streamed_units(layers, target.head, placement)
        link, rest = slowest_transfer_seconds(layers, target.head, placement, links)
        caches = cache_seconds(target.kv_per_token, self.prefix, placement, links.copy or links.read)
        compute, edge = self._compute(target, placement, walked, bool(units))
        experts = self._experts(target, placement)
        return PassCosts(compute, tuple(step), start, link + caches, rest + caches, edge, experts, caches)

    def _experts(self, target: ModelSizes, placement: Placement) -> ExpertCosts | None:
        """Return the costs of on-demand experts; None without any."""
        experts = target.experts
        if experts is None or not placement.on_demand_experts:
            return None
        host, processor, layers = self._expert_host(placement), self.hardware.processor, len(experts.layers)
        seconds = [(rows, layers * expert_layer_seconds(processor, target, rows, host)) for rows in ROWS]
        sources = expert_sources(experts, placement, self._links())
        return ExpertCosts(layers, experts.count, experts.chosen, sources, tuple(seconds))

    def _expert_host(self, placement: Placement) -> Processor | None:
        """Return the CPU if it computes experts next to a device."""
        if not placement.cpu_experts:
            return None
        assert self.hardware.host is not None, "the profile lacks the CPU"
        return self.hardware.host

    def _links(self) -> Links:
        link = self.hardware.link
        return Links(self.hardware.disk.value, None if link is None else link.value)

    def _compute(
        self, target: ModelSizes, placement: Placement, walked: float, streams: bool
    ) -> tuple[Points, Points]:
        """Return (rows, seconds) of all layers and the head, and of the compute at the edges of a pass.

        A resident head processes only the nodes that are walked, a streamed head all nodes.
        """
        processor, on_cpu = self.hardware.processor, len(placement.layers(Tier.CPU))
        expert_host = self._expert_host(placement)
        compute, edge = list[tuple[int, float]](), list[tuple[int, float]]()
        for rows in ROWS:
            layer = cpu = layer_seconds(processor, target, rows, self.prefix, expert_host)
            if on_cpu:
                assert self.hardware.host is not None, "the profile lacks the CPU"
                copied = self.hardware.link.value if self.hardware.link is not None and streams else 0.0
                copied *= placement.gpu_count
                cpu = cpu_layer_seconds(self.hardware.host, target, rows, self.prefix, copied)
            head = product_seconds(processor, target.head_weights, rows)
            walk = 0.0
            if placement.head is Tier.DEVICE:
                head, walk = 0.0, min(rows, walked) * product_seconds(processor, target.head_weights, 2)
            layers = (len(target.layers) - on_cpu) * layer + on_cpu * cpu
            layers += placement.gpu_transfers * gpu_transfer_seconds(target, rows)
            compute.append((rows, layers + head + walk))
            streamed = target.streamed_with(placement)
            edges = exposed_layers(placement, streamed, target.head, head / layer, cpu / layer)
            edge.append((rows, edges * layer + walk))
        return tuple(compute), tuple(edge)

    def with_faster_link(self, factor: float) -> "Estimate":
        """Implements `Pricing`."""
        disk, link = self.hardware.disk.times(factor), self.hardware.link
        faster = replace(self.hardware, disk=disk, link=link and link.times(factor))
        return replace(self, hardware=faster)

    def with_packed_draft(self, bits: int) -> "Estimate | None":
        """Implements `Pricing`."""
        return None if self.draft is None else replace(self, packed=bits)


def layer_seconds(
    processor: Processor, sizes: ModelSizes, rows: int, prefix: int, host: Processor | None = None
) -> float:
    """Return seconds of one layer over `rows` rows after `prefix` positions, its weights in place.

    host: the CPU, if it computes the layer's experts next to `processor`. Default None.
    """
    attention = sizes.attention * rows * (prefix + rows / 2) / (_ATTENTION_SHARE * processor.flops(rows))
    product = product_seconds(processor, sizes.dense_weights, rows)
    seconds = unpacking_seconds(processor, sizes) + product + attention + processor.layer_overhead
    if sizes.experts is None:
        return seconds
    share = len(sizes.experts.layers) / len(sizes.layers)  # average over all layers
    return seconds + share * expert_layer_seconds(processor, sizes, rows, host)


def expert_layer_seconds(
    processor: Processor, sizes: ModelSizes, rows: int, host: Processor | None = None
) -> float:
    """Return seconds of the experts of one layer that has experts; see `layer_seconds`.

    If the CPU computes them, the rows are copied to it and the experts' outputs are copied back.
    """
    assert sizes.experts is not None
    if host is None:
        return experts_seconds(processor, sizes.experts, rows)
    return experts_seconds(host, sizes.experts, rows) + 2 * gpu_transfer_seconds(sizes, rows)


def experts_seconds(processor: Processor, experts: ExpertSizes, rows: int) -> float:
    """Return seconds of one layer's experts over `rows` rows, with the chosen experts in place."""
    asked = float(experts.distinct_experts(rows))
    made = asked * (experts.nbytes + 2.0 * experts.unpacked) if experts.unpacked else 0.0
    rate = processor.flops(max(rows * experts.chosen / asked, _FULL))
    arithmetic = 2.0 * experts.weights * experts.chosen * rows / rate
    return max(arithmetic, 2.0 * experts.weights * asked / processor.bandwidth.value) + (
        made / processor.bandwidth.value
    )


def cpu_layer_seconds(
    host: Processor, sizes: ModelSizes, rows: int, prefix: int, copied: float = 0.0
) -> float:
    """Return seconds of one layer computed by the CPU from RAM, with its rows copied there and back.

    Args:
        host: The CPU with its RAM.
        sizes: Sizes of the model.
        rows: Rows of the pass.
        prefix: Committed positions that attention covers.
        copied: Bytes per second copied out of the same RAM at the same time.
    """
    shared = max(host.bandwidth.value - copied, _LEFT * host.bandwidth.value)
    processor = replace(host, bandwidth=Rate.exactly(shared))
    return layer_seconds(processor, sizes, rows, prefix) + 2 * gpu_transfer_seconds(sizes, rows)


def gpu_transfer_seconds(sizes: ModelSizes, rows: int) -> float:
    """Return seconds to copy the hidden states of `rows` rows from one device to another, or to RAM."""
    return _HOP + 2.0 * rows * sizes.hidden / _HOPPED


def unpacking_seconds(processor: Processor, sizes: ModelSizes) -> float:
    """Return seconds of dequantizing one layer to 16 bits: reading its bytes and writing the values."""
    return (sizes.unpacked_bytes + 2.0 * sizes.unpacked) / processor.bandwidth.value


def product_seconds(processor: Processor, weights: int, rows: int, bytes_per_weight: float = 2.0) -> float:
    """Return seconds of multiplying rows by matrices: the larger of arithmetic and reading the matrices.

    Args:
        processor: Rates of the processor.
        weights: Number of weights in the matrices.
        rows: Number of rows.
        bytes_per_weight: Stored bytes per weight, 2 by default.
    """
    # A profile's rate at few rows measures fetching 16-bit weights, which has its own term here.
    rate = processor.flops(max(rows, _FULL))
    return max(2.0 * weights * rows / rate, weights * bytes_per_weight / processor.bandwidth.value)


def draft_step(
    processor: Processor, draft: ModelSizes, width: int, packed: int | None = None, unpacks: bool = True
) -> float:
    """Return seconds of one step of a draft that is entirely in memory: layers, head, ranking of children.

    packed and unpacks: as in `Estimate`.
    """
    # Bytes per weight: unquantized; or quantized, with 4 per group of 64, then possibly dequantized and read.
    read = 2.0 if packed is None else packed / 8 + 4 / 64 + 4.0 * unpacks
    layers = product_seconds(processor, draft.weights, width, read)
    ranking = _RANKING * 4.0 * draft.vocabulary * width / processor.bandwidth.value
    return (
        len(draft.layers) * (layers + processor.layer_overhead)
        + product_seconds(processor, draft.head_weights, width)
        + ranking
        + _STEP_OVERHEAD
    )


def prefill_seconds(costs: PassCosts, target: ModelSizes, processor: Processor, tokens: int) -> float:
    """Return seconds of the pass over a prompt of `tokens` tokens: layer by layer, all chunks in each.

    The weights are read once; attention grows with the square of the prompt.
    """
    beyond = max(tokens - costs.compute[-1][0], 0)  # beyond the tabulated points
    attention = target.attention * len(target.layers) * tokens * beyond / 2
    seconds = float(costs.compute_seconds(tokens)) + attention / (_ATTENTION_SHARE * processor.flops(1024))
    if costs.experts is not None:
        seconds += float(costs.experts.wait_seconds(tokens))
    return max(float(costs.link_seconds(tokens)), seconds)
