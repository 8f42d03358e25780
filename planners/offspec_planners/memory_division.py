"""Division of memory limits: what a model needs, and the placement of its layers, head and experts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offspec_planners.placement import (
    Placement,
    Sizes,
    Tier,
    TooSmallError,
    place_layers,
    place_on_devices,
    taken,
)

# Page tables, buffers of the kernel and the pages of libraries count against a control group as well. A
# process that fills its limit to the last page spends its time reading its own code back in.
_KERNEL_SHARE = 0.06
_LEAST_EXPERTS = 8  # minimum slots for on-demand experts

CPU_LAYERS = "layers of the CPU"  # name of a part of `TooSmallError`


@dataclass(frozen=True, slots=True)
class HeadNeeds:
    """Output head that stays or streams.

    Args:
        nbytes: Bytes of the head, which `Needs.resident_bytes` includes.
        block_bytes: Bytes of its largest unit if it streams.
        logits_bytes: Bytes of workspace for the logits of all nodes of a tree if it streams.
    """

    nbytes: int
    block_bytes: int
    logits_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """RAM next to a device with memory of its own, for everything but layers.

    Args:
        embedding_bytes: Bytes of embeddings that drafters look tokens up in.
        cache_bytes: Bytes of the target's KV cache if it lives in RAM.
        cpu_bytes: Bytes that computing on the CPU takes in addition to weights: workspace and caches.
        expert_slots_bytes: Bytes of slots of experts.
    """

    embedding_bytes: int = 0
    cache_bytes: int = 0
    cpu_bytes: int = 0
    expert_slots_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.embedding_bytes + self.cache_bytes + self.cpu_bytes + self.expert_slots_bytes


@dataclass(frozen=True, slots=True)
class FurtherGpus:
    """GPUs in addition to the first, each of which holds the KV caches of its own layers.

    Args:
        free_bytes: Bytes of each for layers and their caches.
        layer_cache_bytes: Bytes of the KV cache of one layer.
        cache_bytes: Bytes of `Needs.cache_bytes` that are divided with the layers.
    """

    free_bytes: tuple[int, ...]
    layer_cache_bytes: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertNeeds:
    """Routed experts that can be loaded on demand.

    Args:
        layer_bytes: Bytes of each layer without its experts.
        extra_bytes: Bytes of `Needs.extra_bytes` without experts.
        slot_bytes: Bytes of one expert.
        count: Number of experts in all layers.
        copied_bytes: Bytes allocated while one of them runs.
        unpacking_bytes: Bytes of `Needs.scratch_bytes` for unpacking all experts of a layer together.
        cpu_bytes: Bytes of RAM if the CPU computes them next to a device, `copied_bytes` included.
    """

    layer_bytes: Sequence[int]
    extra_bytes: Sequence[int]
    slot_bytes: int
    count: int
    copied_bytes: int = 0
    unpacking_bytes: int = 0
    cpu_bytes: int = 0

    @property
    def least(self) -> int:
        """Fewest slots."""
        return min(_LEAST_EXPERTS, self.count)


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory that a target and its drafter need.

    Args:
        process_bytes: Bytes of the process before any weights are read.
        resident_bytes: Bytes of weights outside layers: norms, and the head if it stays.
        cache_bytes: Bytes of KV caches and states where layers are computed, those of `cpu_layers` excluded.
        scratch_bytes: Bytes of activations and other intermediate values.
        draft_bytes: Bytes of drafters.
        layer_bytes: Bytes of each layer as it is read.
        extra_bytes: Further bytes that converting each layer takes; see `Sizes`.
        device_runtime_bytes: Bytes that a device with memory of its own sets aside.
        expert_slots_bytes: Bytes of slots of experts where these are computed.
        cpu_layers: Layers that the CPU computes next to a device.
        head: Head that may stream; None if it must stay.
        host: RAM next to a device.
        further_gpus: GPUs in addition to the first; None without any.
        experts: Experts that can be loaded on demand; None if there are none, or their slots are counted.
    """

    process_bytes: int
    resident_bytes: int
    cache_bytes: int
    scratch_bytes: int
    draft_bytes: int
    layer_bytes: Sequence[int]
    extra_bytes: Sequence[int]
    device_runtime_bytes: int = 0
    expert_slots_bytes: int = 0
    cpu_layers: tuple[int, ...] = ()
    head: HeadNeeds | None = None
    host: HostNeeds = HostNeeds()
    further_gpus: FurtherGpus | None = None
    experts: ExpertNeeds | None = None

    @property
    def transit_bytes(self) -> int:
        """Bytes of RAM that weights pass through on their way to a device: the largest layer, or the head."""
        return max(self.resident_bytes, *self.layer_bytes)

    @property
    def computing_bytes(self) -> int:
        """Bytes of everything but layers in the memory that layers are computed in."""
        weights = self.resident_bytes + self.draft_bytes + self.expert_slots_bytes
        return weights + self.cache_bytes + self.scratch_bytes

    def free_ram(self, memory: int) -> int:
        """Bytes of RAM that the process itself leaves."""
        return int(memory * (1 - _KERNEL_SHARE)) - self.process_bytes

    def free_host(self, memory: int) -> int:
        """Bytes of RAM for layers next to a device with memory of its own."""
        return self.free_ram(memory) - self.transit_bytes - self.host.nbytes

    def free_gpus(self, device_memory: int) -> list[int]:
        """Bytes of each GPU for layers, the first of `device_memory`; of several for caches as well."""
        first = device_memory - self.device_runtime_bytes - self.computing_bytes
        more = self.further_gpus
        return [first] if more is None else [first + more.cache_bytes, *more.free_bytes]

    def with_expert_slots(self, slots: int, host_slots: int = 0) -> "MemoryNeeds":
        """Copy with experts in slots instead of layers; unchanged without slots.

        Args:
            slots: Slots where layers are computed.
            host_slots: Slots in RAM next to a device; the CPU computes the experts if there are no others.
        """
        experts = self.experts
        if experts is None or not (slots or host_slots):
            return self
        host = replace(self.host, expert_slots_bytes=host_slots * experts.slot_bytes)
        if not slots:
            host = replace(host, cpu_bytes=host.cpu_bytes + experts.cpu_bytes)
        copied = experts.copied_bytes if slots else 0
        return replace(
            self,
            layer_bytes=experts.layer_bytes,
            extra_bytes=experts.extra_bytes,
            scratch_bytes=self.scratch_bytes - experts.unpacking_bytes + copied,
            expert_slots_bytes=slots * experts.slot_bytes,
            host=host,
            experts=None,
        )

    def scaled(self, share: float) -> "MemoryNeeds":
        """Copy with layers, and experts, of this share of their size."""
        experts = self.experts
        if experts is not None:
            layers = [int(size * share) for size in experts.layer_bytes]
            slot = max(int(experts.slot_bytes * share), 1)
            experts = replace(experts, layer_bytes=layers, slot_bytes=slot)
        layers = [int(size * share) for size in self.layer_bytes]
        return replace(self, layer_bytes=layers, experts=experts)

    def heads(self) -> Iterator[tuple["MemoryNeeds", Sizes]]:
        """Needs and sizes with a head that stays, and with one that streams if it may."""
        sizes = Sizes(tuple(self.layer_bytes), tuple(self.extra_bytes))
        yield self, sizes
        if (head := self.head) is not None:
            resident, scratch = self.resident_bytes - head.nbytes, self.scratch_bytes + head.logits_bytes
            streamed = replace(self, resident_bytes=resident, scratch_bytes=scratch, head=None)
            yield streamed, replace(sizes, head=head.nbytes, block=head.block_bytes)

    def placed_head(self, placement: Placement) -> tuple["MemoryNeeds", Sizes]:
        """Needs and sizes with the head in its tier of a placement."""
        return list(self.heads())[-1 if placement.head is not Tier.DEVICE else 0]


def divide(
    memory: int, needs: MemoryNeeds, device_memory: int | None = None, *, cpu_experts: bool = False
) -> Placement:
    """Place layers, and a head that may stream.

    If a model does not fit where it is computed, its experts are loaded on demand if they can be: everything
    else is placed first, and the rest of the memory keeps experts.

    Args:
        memory: Bytes of RAM.
        needs: Everything that must fit.
        device_memory: Bytes of a device; None if layers are computed in RAM.
        cpu_experts: Whether the CPU computes experts that can be loaded on demand next to the device, however
            much of the model fits there. Default False.

    Raises:
        TooSmallError: It does not fit; lists the parts.
    """
    if needs.experts is None:
        return _divide(memory, needs, device_memory)
    if cpu_experts and device_memory is not None:
        return _divide_on_demand(memory, needs, device_memory, cpu_experts=True)
    found, failures = list[Placement](), list[TooSmallError]()
    for divided in (_divide, _divide_on_demand):
        try:
            found.append(divided(memory, needs, device_memory))
        except TooSmallError as error:
            failures.append(error)
            continue
        if not found[-1].slots:  # all of it stays
            break
    if not found:
        raise min(failures, key=lambda error: error.needed)
    return found[-1]


def _divide_on_demand(
    memory: int, needs: MemoryNeeds, device_memory: int | None, *, cpu_experts: bool = False
) -> Placement:
    """Placement with slots of experts: where layers are computed and in RAM, or in RAM alone for the CPU."""
    assert needs.experts is not None
    slot, least, most = needs.experts.slot_bytes, needs.experts.least, needs.experts.count
    if device_memory is None:
        wanted = needs.with_expert_slots(least)
        placement = _divide(memory, wanted, None)
        return replace(placement, expert_slots=min(least + _left(memory, wanted, placement) // slot, most))
    dense = needs.with_expert_slots(0 if cpu_experts else least, least)
    placement = _divide(memory, dense, device_memory)
    wanted, sizes = dense.placed_head(placement)
    devices, host = taken(sizes, placement)
    near = 0
    if not cpu_experts:
        near = min(least + (wanted.free_gpus(device_memory)[0] - devices[0]) // slot, most)
    in_ram = min(least + (wanted.free_host(memory) - host) // slot, most)
    # If the device keeps all of them, they only pass through RAM.
    return replace(placement, expert_slots=near, host_expert_slots=least if near == most else in_ram)


def _divide(memory: int, needs: MemoryNeeds, device_memory: int | None) -> Placement:
    placements, failures = list[Placement](), list[tuple[TooSmallError, MemoryNeeds]]()
    for wanted, sizes in needs.heads():
        try:
            placements.append(_place(memory, wanted, sizes, device_memory))
        except TooSmallError as error:
            failures.append((error, wanted))
            continue
        if not _is_tight(placements[-1]):
            return placements[-1]
    if placements:
        return placements[0]
    failure, failed = min(
        failures,
        key=lambda found: (found[0].where is Tier.DEVICE, found[1].computing_bytes + found[0].needed),
    )
    raise _too_small(memory, device_memory, failed, failure)


def placement_fits(
    memory: int, needs: MemoryNeeds, placement: Placement, device_memory: int | None = None
) -> bool:
    """Return whether a placement that was decided elsewhere fits as well; see `divide`."""
    if placement.on_demand_experts and (
        needs.experts is None or (device_memory is not None) != (placement.host_expert_slots > 0)
    ):
        return False
    needs = needs.with_expert_slots(placement.expert_slots, placement.host_expert_slots)
    if device_memory is None:
        return _left(memory, needs, placement) >= 0
    wanted, sizes = needs.placed_head(placement)
    more = wanted.further_gpus
    devices, host = taken(sizes, placement, 0 if more is None else more.layer_cache_bytes)
    free = wanted.free_gpus(device_memory)
    if len(devices) > len(free) or host > wanted.free_host(memory):
        return False
    return all(used <= size for used, size in zip(devices, free, strict=False))


def _left(memory: int, needs: MemoryNeeds, placement: Placement) -> int:
    """Return the RAM bytes left by a placement that computes everything there; negative if too large."""
    wanted, sizes = needs.placed_head(placement)
    return needs.free_ram(memory) - wanted.computing_bytes - taken(sizes, placement)[0][0]


def _place(memory: int, needs: MemoryNeeds, sizes: Sizes, device_memory: int | None) -> Placement:
    if device_memory is None:
        return place_layers(sizes, needs.free_ram(memory) - needs.computing_bytes)
    cache = 0 if needs.further_gpus is None else needs.further_gpus.layer_cache_bytes
    free, host = needs.free_gpus(device_memory), needs.free_host(memory)
    return place_on_devices(sizes, free, host, cache=cache, cpu=needs.cpu_layers)


def _is_tight(placement: Placement) -> bool:
    """Return whether there is room for no layer and only two slots.

    With two slots the link is idle whenever one is full and the other in use: a third slot is worth more than
    a resident head.
    """
    return placement.slots == 2 and not placement.resident


def _too_small(
    memory: int, device_memory: int | None, needs: MemoryNeeds, error: TooSmallError
) -> TooSmallError:
    """Return an error with the least sufficient memory and its parts, by name."""
    host, on_device = needs.host, device_memory is not None and error.where is Tier.DEVICE
    parts = dict[str, int]()
    if not on_device:
        parts |= {
            "Python and libraries": needs.process_bytes,
            "transfer to the device": needs.transit_bytes if device_memory is not None else 0,
            "the draft's embedding": host.embedding_bytes,
            "experts in transit" if needs.expert_slots_bytes else "experts in RAM": host.expert_slots_bytes,
            "KV cache in RAM": host.cache_bytes,
            "computing on the CPU": host.cpu_bytes,
        }
    if on_device or device_memory is None:
        parts |= {
            "the device's own share": needs.device_runtime_bytes,
            "head and norms": needs.resident_bytes,
            "KV caches": needs.cache_bytes,
            "activations": needs.scratch_bytes,
            "the draft": needs.draft_bytes,
            "experts": needs.expert_slots_bytes,
        }
    on_cpu = [needs.layer_bytes[layer] + needs.extra_bytes[layer] for layer in needs.cpu_layers]
    parts[CPU_LAYERS] = 0 if on_device else sum(on_cpu)
    parts["two layers"] = error.needed - parts[CPU_LAYERS]
    least = sum(parts.values())
    if on_device:
        return TooSmallError(least, device_memory or 0, Tier.DEVICE, parts)
    parts["pages of Linux and libraries"] = int(least / (1 - _KERNEL_SHARE)) + 2 - least
    return TooSmallError(least + parts["pages of Linux and libraries"], memory, Tier.HOST, parts)
