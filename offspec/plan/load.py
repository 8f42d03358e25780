"""From a configuration to a loaded target and draft.

All models are opened and sized before any weights are read, so that a model that does not fit is an immediate
error.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.hub import is_cached, is_reachable
from offspec.checkpoint.open import DEMO
from offspec.core import memory
from offspec.core.config import AUTO, MTP, EngineConfig
from offspec.core.errors import CapacityError, RequestError
from offspec.core.events import Notice
from offspec.core.trace import OFF, Timeline
from offspec.draft.known_drafts import KnownDraft, known_drafts
from offspec.draft.mix.sources import Sources
from offspec.draft.open import DraftOpener, Notify
from offspec.model import devices
from offspec.model.compile_notice import notify_compilation
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec.plan.auto_draft import choose_auto_draft, may_download_drafts
from offspec.plan.choose_device import choose_device
from offspec.plan.fit import Fit, find_fit, fits_unpacked, max_sequences, self_draft_does_not_fit
from offspec.plan.load_drafts import bytes_progress, load_drafts
from offspec.plan.needs import tree_nodes
from offspec.plan.opened import OpenedModels
from offspec.plan.records import preload_experts
from offspec.plan.warm_up import warm_up_kernels
from offspec_planners.placement import Placement, Tier
from offspec_planners.units import format_bytes

_ROUNDING = (
    "on this CPU the rounding of a row depends on the other rows of a product, whatever their number: if two "
    "tokens are almost equally likely, an answer may depend on the draft"
)

_NO_CHOICE = (
    "`experts` has no effect: it selects where an MoE model's experts are computed next to a GPU, and this "
    "model has no experts that are loaded on demand"
)

_UNPINNED = (
    "{} of RAM could not be pinned, so copies to the device are slower: raise the limit of locked "
    "memory (ulimit -l), or give less `memory`"
)

_UNLIKE = (
    "these GPUs are of different generations and may round differently: in bfloat16 an answer may depend on "
    "how memory limits divide the layers among them"
)

_opened: weakref.WeakSet[LoadedModel] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded target, its draft sources, and the settings chosen for them."""

    target: LoadedModel
    sources: Sources
    codec: TextCodec
    context: int
    placement: Placement
    memory: int
    vram: int | None = None
    target_fingerprint: str = ""  # identifies the target
    sequences: int = 1  # maximum concurrent sequences


def open_models(config: EngineConfig, notify: Notify, timeline: Timeline = OFF) -> OpenedModels:
    """Open the models of a configuration. Raises any OffspecError; on an error nothing stays open."""
    memory.limit_onednn_cache()
    config = choose_device(config)
    device, *more = devices.find_devices(config.device)
    dtype = getattr(torch, config.dtype)
    for gpu in (device, *more):
        if (told := devices.missing_kernels(gpu)) is not None:
            notify(Notice(told))
    more_vram = tuple(claimed for gpu in more if (claimed := devices.claim_vram(gpu, config.vram)))
    vram = devices.claim_vram(device, config.vram)  # the last one, on which streams and graphs are made
    if more and len({torch.cuda.get_device_capability(gpu) for gpu in (device, *more)}) > 1:
        notify(Notice(_UNLIKE))
    given = memory.limit_to_cgroup(config.memory, notify) if config.memory else memory.usable_bytes()
    if config.experts == "cpu" and more:
        raise RequestError('`experts="cpu"` works with a single GPU: name one with `device`')
    checkpoint = _open_target(config, notify)
    target = LoadedModel(
        checkpoint.folder,
        checkpoint.tensors,
        dtype,
        device,
        timeline,
        more,
        int8_cache=config.kv_cache == "int8",
    )
    if config.experts != AUTO and not target.experts.count:
        notify(Notice(_NO_CHOICE))
    try:
        codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
        opener = DraftOpener(config, checkpoint, target, codec, notify)
        drafts = opener.open(() if config.drafts == (AUTO,) or config.budget == 1 else config.drafts)
    except BaseException:
        target.close()
        raise
    loaded = [model for model in (target, drafts.model) if model is not None]
    cpu_layers = bool(config.cpu_layers) or config.plans_cpu_layers
    cpu_helps = cpu_layers or config.experts == "cpu" or config.plans_cpu_experts
    with notify_compilation(notify, wanted=device.type == "cpu" or cpu_helps):
        for model in loaded:
            model.warm_up()  # its compiled code is part of the process's memory
        if cpu_helps:
            target.warm_up(devices.find_device("cpu"))
    gc.collect()
    memory.malloc_trim()
    memory.evict_code_pages()
    runtime = memory.runtime_overhead(fresh=any(model.is_loaded for model in _opened))
    _opened.update(loaded)
    opened = OpenedModels(
        config, target, checkpoint.fingerprint, drafts, given, vram, runtime, config.draft, codec, more_vram
    )
    if config.drafts != (AUTO,):
        return _with_sequences(opened)
    try:
        found = _with_best_draft(opened, opener, known_drafts(config.model, checkpoint.config), notify)
    except BaseException:
        opened.close()
        raise
    if found.draft is not None:
        with notify_compilation(notify, wanted=device.type == "cpu"):
            found.draft.warm_up()
        _opened.add(found.draft)
    return _with_sequences(found)


def _with_sequences(opened: OpenedModels) -> OpenedModels:
    """Replace `sequences="auto"` by the number of sequences that fit."""
    config = opened.config
    if config.sequences != AUTO:
        return opened
    try:
        return replace(opened, config=replace(config, sequences=max_sequences(opened, config)))
    except CapacityError:  # reported once the model is loaded
        return replace(opened, config=replace(config, sequences=1))
    except BaseException:
        opened.close()
        raise


def _with_best_draft(
    opened: OpenedModels, opener: DraftOpener, known: Sequence[KnownDraft], notify: Notify
) -> OpenedModels:
    """Replace `draft="auto"` by the best available draft."""
    choice, tried = choose_auto_draft(
        opened,
        known,
        lambda name: opener.open([name]),
        lambda name: name in (MTP, DEMO) or is_cached(name),
        fetches=may_download_drafts(opened.config.model, known, is_cached, is_reachable),
    )
    for name, found in tried.items():
        if name not in choice.names and found.draft is not None:
            found.draft.close()
    if choice.line:
        notify(Notice(choice.line))
    taken = tried.get(choice.names[0], opened)
    return replace(taken, config=replace(opened.config, draft=",".join(choice.names)))


def _open_target(config: EngineConfig, notify: Notify) -> Checkpoint:
    """Open the model, or a pack of it, which is made on first use."""
    if config.quantize is None:
        return open_checkpoint(config.model, notify=notify)
    from offspec.model.quantize.pack import packed_model

    return packed_model(config.model, config.quantize, notify, config.memory)


def load_models(opened: OpenedModels, config: EngineConfig, fit: Fit, notify: Notify) -> Assembly:
    """Load the opened models as `fit` says. On an error all of them are closed.

    Raises any OffspecError, and KernelsUnavailableError if the models must be opened and loaded again.
    """
    recording = torch.is_grad_enabled()
    target, drafts, codec = opened.target, opened.drafts, opened.codec
    assert codec is not None
    try:
        if drafts.model is not None and not fit.drafts_with_model:
            dropped = set(drafts.names).difference(drafts.without_model().names)
            others = [name for name in config.drafts if name not in dropped]
            instead = f"draft: {' and '.join(others)} alone" if others else "no draft"
            why = self_draft_does_not_fit(opened, config)
            if fit.placement.on_demand_experts:
                why = "using the memory of the draft model to cache experts is expected to be faster"
            elif not opened.config.uses_self_draft or find_fit(opened, config).draft_mode != fit.draft_mode:
                why = "the plan expects the model to be faster without the draft model"
            notify(Notice(f"{instead}, since {why}"))
            drafts = drafts.without_model()
        capacity = fit.context + tree_nodes(config)
        target.load(
            fit.placement,
            capacity,
            bytes_progress(notify, "Loading the target"),
            fit.chunk,
            unpacked=fits_unpacked(opened, config, fit),
            context=fit.context,
            embedding_in_ram=opened.embeds,
        )
        preload_experts(target, opened.target_fingerprint)
        for file in sorted(target.buffered_files):
            notify(Notice(f"{file.name} is read through the page cache: its file system refuses O_DIRECT"))
        target.tree_model.cache.block.allocate()
        if target.unpinned_bytes:
            notify(Notice(_UNPINNED.format(format_bytes(target.unpinned_bytes))))
        if not target.tree_model.row_counts.rows_independent:
            notify(Notice(_ROUNDING))
        sources = load_drafts(drafts, config, fit, target, codec, notify)
        try:
            warm_up_kernels(target, sources, config, codec, notify)
        except BaseException:
            sources.close()
            raise
        memory.malloc_trim()
        memory.evict_code_pages()
        if config.min_sequences > 1:  # draft steps with ever different numbers of rows
            memory.lower_mmap_threshold()
        return Assembly(
            target,
            sources,
            codec,
            fit.context,
            fit.placement,
            opened.memory,
            opened.vram,
            opened.target_fingerprint,
            config.min_sequences,
        )
    except BaseException as error:
        torch.set_grad_enabled(recording)
        opened.close()
        if devices.is_out_of_memory(error):
            raise CapacityError(
                f"{target.device} ran out of memory while loading; try a smaller `context` or `budget`, a "
                'smaller draft, or `draft="none"`',
                needed=0,
                given=opened.vram or opened.memory,
            ) from error
        raise


def open_and_load(config: EngineConfig, notify: Notify, timeline: Timeline = OFF) -> Assembly:
    """Open and load with the budget and width of the configuration. Raises any OffspecError."""
    opened = open_models(config, notify, timeline)
    try:
        fit = find_fit(opened, config)
    except BaseException:
        opened.close()
        raise
    return load_models(opened, config, fit, notify)


def describe(assembly: Assembly) -> dict[str, Any]:
    """Return placement and sizes, for logs and benches."""
    placement, target = assembly.placement, assembly.target
    sizes = target.dense_bytes if placement.on_demand_experts else target.layer_bytes
    streamed = [i for i, tier in enumerate(placement.tiers) if tier.streams]
    kinds = {"resident": Tier.DEVICE, "cpu": Tier.CPU, "host": Tier.HOST, "disk": Tier.DISK}
    layers = {kind: placement.layers(tier) for kind, tier in kinds.items()}
    return {
        "context": assembly.context,
        **{f"{kind}_layers": len(which) for kind, which in layers.items()},
        "streamed_layers": len(streamed),
        **{f"{kind}_bytes": sum(sizes[i] for i in which) for kind, which in layers.items()},
        "slot_bytes": placement.slots * max((sizes[i] for i in streamed), default=0),
        "slots": placement.slots,
        "expert_slots": placement.expert_slots,
        "host_expert_slots": placement.host_expert_slots,
        "cpu_experts": placement.cpu_experts,
        "expert_slot_bytes": target.experts.slot_bytes,
        "experts": target.experts.count,
        "staging": placement.staging,
        "head": str(placement.head),
        "caches": str(placement.caches),
        "chunk": assembly.target.tree_model.chunk,
        "kv_cache": "int8" if assembly.target.int8_cache else "model",
        "memory": assembly.memory,
        "vram": assembly.vram,
        "gpu_names": [torch.cuda.get_device_name(gpu) for gpu in target.devices if gpu.type == "cuda"],
        "gpus": [
            sum(tier != Tier.CPU for tier in placement.tiers_on(gpu)) for gpu in range(placement.gpu_count)
        ],
    }
