"""Parts of memory under a fit: everything that takes room, and what stays on disk."""

from offspec.core.config import EngineConfig
from offspec.plan.fit import Fit, fit_needs, keeps_unpacked
from offspec.plan.opened import OpenedModels
from offspec_planners.memory_division import Needs
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan import Part


def memory_parts(opened: OpenedModels, config: EngineConfig, fit: Fit) -> tuple[Part, ...]:
    """Everything that takes room under an arrangement, and what stays on disk."""
    target, placement = opened.target, fit.placement
    needs = fit_needs(opened, config, fit)
    needs = needs.with_expert_slots(placement.expert_slots, placement.host_expert_slots)
    layers = target.held_bytes if keeps_unpacked(opened, config, fit) else needs.layer_bytes
    head = target.head_stored_bytes if placement.head is not Tier.DEVICE else 0
    slot = max(*needs.layer_bytes, target.head_block_bytes if head else 0)
    logits = needs.head.logits_bytes if head and needs.head is not None else 0
    first, *others = [
        sum(layers[i] for i in placement.resident if placement.gpu_of(i) == gpu)
        for gpu in range(1 + len(opened.more_vram))
    ]
    caches, more = needs.cache_bytes, needs.further_gpus
    if more is not None:
        caches += _caches_on(0, needs, placement) - more.cache_bytes
    below = (Tier.CPU, Tier.HOST, Tier.DISK)
    process = Tier.DEVICE if target.device.type == "cpu" else Tier.HOST
    found = [
        ("Python and libraries", process, needs.process_bytes),
        *(("layers", tier, sum(layers[layer] for layer in placement.layers(tier))) for tier in below),
        ("layers", Tier.DEVICE, first),
        ("head", placement.head, head or target.head_bytes),
        ("norms", Tier.DEVICE, needs.resident_bytes - target.head_bytes),
        ("caches", Tier.DEVICE, caches),
        ("caches", Tier.HOST, needs.host.cache_bytes),
        ("draft", Tier.DEVICE, needs.draft_bytes),
        ("the draft's embedding", Tier.HOST, needs.host.embedding_bytes),
        ("scratch", Tier.DEVICE, needs.scratch_bytes + logits + max(needs.extra_bytes)),
        ("slots", Tier.DEVICE, placement.slots * slot),
        ("experts", Tier.DEVICE, needs.expert_slots_bytes),
        ("experts", Tier.HOST, needs.host.expert_slots_bytes),
        ("experts", Tier.DISK, target.experts.nbytes if placement.by_need else 0),
        ("staging slots", Tier.HOST, placement.staging * slot * placement.gpu_count),
        ("caches and scratch", Tier.CPU, needs.host.cpu_bytes),
        ("the device's own share", Tier.DEVICE, needs.device_runtime_bytes),
    ]
    parts = [Part(what, tier, size) for what, tier, size in found if size > 0]
    for gpu, own in enumerate(others, 1):
        assert more is not None
        runtime = needs.device_runtime_bytes
        scratch = opened.more_vram[gpu - 1] - more.free_bytes[gpu - 1] - runtime + max(needs.extra_bytes)
        slots = placement.slots * slot if any(tier.streams for tier in placement.tiers_on(gpu)) else 0
        names = ("layers", "caches", "scratch", "slots", "the device's own share")
        sizes = (own, _caches_on(gpu, needs, placement), scratch, slots, runtime)
        parts += [Part(what, Tier.DEVICE, size, gpu) for what, size in zip(names, sizes, strict=True) if size]
    return tuple(parts)


def _caches_on(gpu: int, needs: Needs, placement: Placement) -> int:
    """Bytes of the KV caches of the layers that one of several GPUs computes."""
    layers = sum(tier is not Tier.CPU for tier in placement.tiers_on(gpu))
    return 0 if needs.further_gpus is None else needs.further_gpus.layer_cache_bytes * layers
