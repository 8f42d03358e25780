"""What a pass costs: from bytes, FLOPs and measured points to seconds, with what overlaps taken out.

Three things go on in an iteration. The draft works, then the target computes, and beside both of them the
link brings weights into a ring of slots. The ring may run ahead of the computation by its slots and no
further, so in steady state an iteration takes the longest of

    draft + compute        the processor is never idle
    link                   the link is never idle
    draft + rest + edge    the ring filled up while the draft worked, and the link stood still

Experts that a pass misses are known only when its routers have run, so nothing of them is ahead of it: their
time comes on top of the link's, and what does not hide behind the computing of other experts on top of the
pass's; see `expert_costs`.

`rest` is the time of all that streams but what fits in the ring, `edge` that of computing before the link
goes on and after the last unit has come: see `crossing`. Checked against a simulation of the ring, slot by
slot, in the tests.
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
    edge_layers,
    expert_sources,
    slowest_crossing,
    streamed_units,
)

# Row counts at which compute is tabulated from a hardware profile; between them it is piecewise linear.
ROWS = (1, 2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
WIDTHS = (1, 4, 8, 16, 32, 64, 128)
PROMPT_ROWS = 1024  # of prompts in a pass that several sequences share
JOINED_WIDTHS = (*WIDTHS, 256, 512, 1024, 2048)  # of steps in which several sequences expand nodes

_ATTENTION_SHARE = 0.3  # of a product's rate: what attention over a mask reaches
_FULL = 64  # rows from which arithmetic, not memory, bounds a product
_RANKING = 6  # times that a draft's logits are read and written while children are ranked
_HOP = 5e-5  # seconds of a copy of a few rows between devices or to RAM, and of waiting for it
_HOPPED = 5e9  # bytes per second of such copies, from memory that is not pinned
_LEFT = 0.25  # share of the RAM's bandwidth that the CPU gets at least beside a link
_IDLE = 1.25  # times its arithmetic that the link takes for a pass that leaves the processor idle
_STEP_OVERHEAD = 1e-3  # seconds of a step that no device sees: choosing nodes, placing their children


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The bytes and the arithmetic of a model.

    Args:
        name: For error messages and plans.
        layers: Bytes of each decoder layer, its experts included, as it streams or stays.
        weights: Weights of one layer that each row is multiplied with, of the experts those chosen.
        head: Bytes of the output head.
        head_weights: Weights of the output head.
        kv_per_token: Bytes of cache that one position takes over all layers.
        attention: FLOPs of one layer for each pair of row and key.
        hidden: Size of the hidden states.
        vocabulary: Tokens.
        unpacked: Values of a layer that every pass makes of packed weights, but for those of experts.
        unpacked_bytes: Bytes that those values are stored in.
        experts: Its routed experts; None for a model without.
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
        """The same model with its layers packed, whose weights take `stored` bits now."""
        values = 8 / stored * sum(self.dense_layers) / len(self.layers)
        layers = tuple(int(size * bits / stored) for size in self.layers)
        experts = self.experts
        if experts is not None:
            experts = replace(experts, nbytes=int(experts.nbytes * bits / stored), unpacked=experts.weights)
        packed = replace(self, layers=layers, unpacked=values, unpacked_bytes=values * bits / 8)
        return replace(packed, experts=experts)

    def unpacked_once(self) -> "ModelSizes":
        """The same model where its weights are unpacked as it is loaded."""
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
        """Weights of one layer, of average size, that every row is multiplied with, whatever it chooses."""
        if self.experts is None:
            return self.weights
        chosen = self.experts.chosen * self.experts.weights * len(self.experts.layers)
        return max(self.weights - chosen // len(self.layers), 0)

    def streamed_with(self, placement: Placement) -> tuple[int, ...]:
        """Bytes of each layer that come with it: without its experts where those come by need."""
        return self.dense_layers if placement.by_need else self.layers

    @property
    def parameters(self) -> int:
        """Weights that a row is multiplied with, head included."""
        return self.weights * len(self.layers) + self.head_weights


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of a pass and of draft steps, as functions of their rows and widths.

    Curves are piecewise linear and continued by their last slope.

    Args:
        compute: (rows, seconds) of layers, head and walk, rows ascending.
        step: (width, seconds) of a draft step, widths ascending.
        start: Seconds that the draft takes in every pass besides its steps.
        link: Seconds in which all that streams crosses the slowest link.
        rest: Seconds of `link` that cannot be ahead of a pass.
        edge: (rows, seconds) of the part of compute that has no link time beside it where the ring is full
            when a pass begins.
        experts: What experts cost that come by need; None where none do.
        caches: Seconds of `link`, and of `rest`, in which the keys and values of a sequence cross it.
        hidden: Share of a draft's seconds that go on beside the pass before, where `link_binds`.
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
        """The same for passes and draft steps that so many sequences share, each taking an equal part.

        A pass of all their rows costs what it does of one sequence, and so does a step of all their nodes;
        what each brings along by itself is its own.
        """
        if count == 1:
            return self
        more = (count - 1) * self.caches
        experts = None if self.experts is None else self.experts.for_sequences(count)
        link, rest = self.link + more, self.rest + more
        return replace(self, start=count * self.start, link=link, rest=rest, experts=experts, hidden=0.0)

    def with_steps(self, factor: float) -> "PassCosts":
        """The same with draft steps that take so many times as long."""
        return replace(self, step=tuple((width, factor * seconds) for width, seconds in self.step))

    def behind(self, rows: int) -> "PassCosts":
        """The same for a tree that shares a pass with so many rows of a prompt, which comes in any case.

        A node costs what the pass takes longer for it. What tokens bring is that later passes are spared,
        each of which costs as one of a single row at least.
        """
        corners = {count for count, _ in self.compute}
        every = {1, *corners, *(count - rows for count in corners)}
        nodes = np.array(sorted(count for count in every if count >= 1))
        alone, first = self.iteration(0.0, 1), self.pass_seconds(rows + 1)
        seconds = alone + np.maximum.accumulate(np.maximum(self.pass_seconds(rows + nodes) - first, 0.0))
        points = tuple(zip(nodes.tolist(), seconds.tolist(), strict=True))
        return PassCosts(points, self.step, self.start)

    def compute_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a pass of `rows` rows with its weights in place."""
        return _piecewise(self.compute, rows)

    def link_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds in which all that a pass of `rows` rows needs crosses the slowest link."""
        if self.experts is None:
            return np.full(np.shape(rows), self.link)
        return self.experts.link_seconds(rows, self.link)

    def step_seconds(self, width: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a draft step that expands `width` nodes."""
        return _piecewise(self.step, width)

    def draft_seconds(self, widths: Sequence[int]) -> float:
        """Seconds of growing a tree in steps of these widths; 0 where there is none."""
        if not len(widths):
            return 0.0
        return self.start + float(self.step_seconds(np.asarray(widths)).sum())

    def pass_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a pass of `rows` rows behind a draft that gave the ring time to fill."""
        compute, filling = self.compute_seconds(rows), self.rest + _piecewise(self.edge, rows)
        if self.experts is None:
            return np.maximum(compute, filling)
        come = self.experts.link_seconds(rows, self.rest) - self.rest
        return np.maximum(compute + self.experts.wait_seconds(rows), filling + come)

    def iteration(self, draft: float | NDArray[np.float64], rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds of drafting for `draft` seconds and verifying `rows` rows, in steady state."""
        left = draft * self.unhidden(rows)
        return np.asarray(np.maximum(left + self.pass_seconds(rows), self.link_seconds(rows)), np.float64)

    def unhidden(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Share of a draft's seconds that passes of `rows` rows wait for."""
        return np.where(self.link_binds(rows), 1.0 - self.hidden, 1.0)

    def link_binds(self, rows: ArrayLike) -> NDArray[np.bool_]:
        """Whether a pass of `rows` rows waits so much for its weights that a draft can go on beside it."""
        return np.asarray(self.link_seconds(rows) >= _IDLE * self.compute_seconds(rows))

    def bound(self, draft: float, rows: int) -> str:
        """What an iteration waits for: "link", "compute", or "draft" where that takes longer than compute."""
        compute = float(self.compute_seconds(rows))
        draft *= float(self.unhidden(rows))
        if float(np.maximum(draft + self.pass_seconds(rows), self.link_seconds(rows))) > draft + compute:
            return "link"
        return "draft" if draft > compute else "compute"


class Pricing(Protocol):
    """Something that knows what passes cost under any placement: from measured parts, or from a profile.

    knows_cpu: whether that goes for placements with layers, or experts, that a CPU computes beside a device.
    """

    @property
    def knows_cpu(self) -> bool: ...

    def costs(self, target: ModelSizes, placement: Placement, walked: float) -> PassCosts:
        """walked: nodes that a pass walks on average."""

    def with_faster_link(self, factor: float) -> "Pricing":
        """These costs with bandwidth multiplied by a factor."""

    def with_packed_draft(self, bits: int) -> "Pricing | None":
        """These costs with the draft's weights kept in so many bits; None where that is not known."""


def _piecewise(points: Points, at: ArrayLike) -> NDArray[np.float64]:
    """Linear between the points; below the first it is flat, above the last it goes on as it went."""
    x, y = _columns(points)
    wanted = np.asarray(at, np.float64)
    found = np.interp(wanted, x, y)
    if len(x) > 1:
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        found = found + np.maximum(wanted - x[-1], 0.0) * max(slope, 0.0)
    return np.asarray(found, np.float64)


@lru_cache(maxsize=64)
def _columns(points: Points) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points are asked for far more often than they change."""
    return np.array([x for x, _ in points], np.float64), np.array([y for _, y in points], np.float64)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The costs of passes on a machine from its profile alone.

    Args:
        hardware: The profile.
        draft: Sizes of the draft; None without one.
        packed: Bits that the draft's weights are kept in; None where they are values.
        prefix: Committed positions that attention looks back on.
        unpacks: Whether such weights are unpacked whenever they are used, not multiplied as they are.
        widths: At which draft steps are tabulated.
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
            start = step[2][1] - step[0][1]  # the tokens committed last run with the root
        layers, links = target.streamed_with(placement), self._links()
        units = streamed_units(layers, target.head, placement)
        link, rest = slowest_crossing(layers, target.head, placement, links)
        caches = cache_seconds(target.kv_per_token, self.prefix, placement, links.copy or links.read)
        compute, edge = self._compute(target, placement, walked, bool(units))
        experts = self._experts(target, placement)
        return PassCosts(compute, tuple(step), start, link + caches, rest + caches, edge, experts, caches)

    def _experts(self, target: ModelSizes, placement: Placement) -> ExpertCosts | None:
        """Of experts that come by need; None where none do."""
        experts = target.experts
        if experts is None or not placement.by_need:
            return None
        host, processor, layers = self._expert_host(placement), self.hardware.processor, len(experts.layers)
        seconds = [(rows, layers * expert_layer_seconds(processor, target, rows, host)) for rows in ROWS]
        sources = expert_sources(experts, placement, self._links())
        return ExpertCosts(layers, experts.count, experts.chosen, sources, tuple(seconds))

    def _expert_host(self, placement: Placement) -> Processor | None:
        """The CPU, where it computes experts beside a device."""
        if not placement.cpu_experts:
            return None
        assert self.hardware.host is not None, "nothing is known of the CPU"
        return self.hardware.host

    def _links(self) -> Links:
        link = self.hardware.link
        return Links(self.hardware.disk.value, None if link is None else link.value)

    def _compute(
        self, target: ModelSizes, placement: Placement, walked: float, streams: bool
    ) -> tuple[Points, Points]:
        """(rows, seconds) of all layers and of the head, and of those at the edges of a pass.

        A head that stays runs for the nodes that are walked, one that streams for all.
        """
        processor, on_cpu = self.hardware.processor, len(placement.layers(Tier.CPU))
        expert_host = self._expert_host(placement)
        compute, edge = list[tuple[int, float]](), list[tuple[int, float]]()
        for rows in ROWS:
            layer = cpu = layer_seconds(processor, target, rows, self.prefix, expert_host)
            if on_cpu:
                assert self.hardware.host is not None, "nothing is known of the CPU"
                copied = self.hardware.link.value if self.hardware.link is not None and streams else 0.0
                copied *= placement.gpu_count
                cpu = cpu_layer_seconds(self.hardware.host, target, rows, self.prefix, copied)
            head = product_seconds(processor, target.head_weights, rows)
            walk = 0.0
            if placement.head is Tier.DEVICE:
                head, walk = 0.0, min(rows, walked) * product_seconds(processor, target.head_weights, 2)
            layers = (len(target.layers) - on_cpu) * layer + on_cpu * cpu
            layers += placement.hops * hop_seconds(target, rows)
            compute.append((rows, layers + head + walk))
            streamed = target.streamed_with(placement)
            edges = edge_layers(placement, streamed, target.head, head / layer, cpu / layer)
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
    """Seconds of one layer over `rows` rows behind `prefix` positions, its weights in place.

    host: the CPU, where it computes the layer's experts beside `processor`. Default None.
    """
    attention = sizes.attention * rows * (prefix + rows / 2) / (_ATTENTION_SHARE * processor.flops(rows))
    product = product_seconds(processor, sizes.dense_weights, rows)
    seconds = unpacking_seconds(processor, sizes) + product + attention + processor.layer_overhead
    if sizes.experts is None:
        return seconds
    share = len(sizes.experts.layers) / len(sizes.layers)  # of a layer of average size
    return seconds + share * expert_layer_seconds(processor, sizes, rows, host)


def expert_layer_seconds(
    processor: Processor, sizes: ModelSizes, rows: int, host: Processor | None = None
) -> float:
    """Seconds of the experts of one layer that has some; see `layer_seconds`.

    Where the CPU computes them, the rows are brought there, and what the experts say of them back.
    """
    assert sizes.experts is not None
    if host is None:
        return experts_seconds(processor, sizes.experts, rows)
    return experts_seconds(host, sizes.experts, rows) + 2 * hop_seconds(sizes, rows)


def experts_seconds(processor: Processor, experts: ExpertSizes, rows: int) -> float:
    """Seconds of the experts of one layer over `rows` rows, those that are chosen being in place."""
    asked = float(experts.union(rows))
    made = asked * (experts.nbytes + 2.0 * experts.unpacked) if experts.unpacked else 0.0
    rate = processor.flops(max(rows * experts.chosen / asked, _FULL))
    arithmetic = 2.0 * experts.weights * experts.chosen * rows / rate
    return max(arithmetic, 2.0 * experts.weights * asked / processor.bandwidth.value) + (
        made / processor.bandwidth.value
    )


def cpu_layer_seconds(
    host: Processor, sizes: ModelSizes, rows: int, prefix: int, copied: float = 0.0
) -> float:
    """Seconds of one layer that the CPU computes from RAM, its rows brought there and back.

    Args:
        host: The CPU with its RAM.
        sizes: Of the model.
        rows: Rows of the pass.
        prefix: Positions that they look back on.
        copied: Bytes per second that are copied out of the same RAM meanwhile.
    """
    shared = max(host.bandwidth.value - copied, _LEFT * host.bandwidth.value)
    processor = replace(host, bandwidth=Rate.exactly(shared))
    return layer_seconds(processor, sizes, rows, prefix) + 2 * hop_seconds(sizes, rows)


def hop_seconds(sizes: ModelSizes, rows: int) -> float:
    """Seconds in which the hidden states of `rows` rows go from one device to another, or to RAM."""
    return _HOP + 2.0 * rows * sizes.hidden / _HOPPED


def unpacking_seconds(processor: Processor, sizes: ModelSizes) -> float:
    """Seconds of making 16-bit values of one packed layer: its bytes read and those of the values written."""
    return (sizes.unpacked_bytes + 2.0 * sizes.unpacked) / processor.bandwidth.value


def product_seconds(processor: Processor, weights: int, rows: int, bytes_per_weight: float = 2.0) -> float:
    """Seconds of multiplying rows with matrices: the larger of arithmetic and reading the matrices.

    Args:
        processor: Rates of the processor.
        weights: Weights of the matrices.
        rows: Rows that are multiplied.
        bytes_per_weight: As the matrices are stored, 2 by default.
    """
    # A profile's rate at few rows is that of fetching 16-bit weights, which has a term of its own here.
    rate = processor.flops(max(rows, _FULL))
    return max(2.0 * weights * rows / rate, weights * bytes_per_weight / processor.bandwidth.value)


def draft_step(
    processor: Processor, draft: ModelSizes, width: int, packed: int | None = None, unpacks: bool = True
) -> float:
    """One step of a draft that is all in memory: its layers, its head, the ranking of children.

    packed and unpacks: as in `Estimate`.
    """
    # Bytes a weight: as it is; or read packed, with four a group of 64, then perhaps unpacked and read.
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
    """Seconds of the pass that carries a prompt of `tokens` tokens: layer by layer, its chunks in each.

    The weights are read once; attention grows with the square of the prompt.
    """
    beyond = max(tokens - costs.compute[-1][0], 0)  # what the points do not know of
    attention = target.attention * len(target.layers) * tokens * beyond / 2
    seconds = float(costs.compute_seconds(tokens)) + attention / (_ATTENTION_SHARE * processor.flops(1024))
    if costs.experts is not None:
        seconds += float(costs.experts.wait_seconds(tokens))
    return max(float(costs.link_seconds(tokens)), seconds)
