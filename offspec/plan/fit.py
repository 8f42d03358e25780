"""Division of memory: the context, how the draft is held, and the tier of each layer.

`Opened` is what memory is divided among; its `fit` decides, and everything else here says what that comes to.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import torch

from offspec.core.config import LOOKUPS, DraftBits, EngineConfig, format_bytes
from offspec.core.errors import CapacityError, RequestError
from offspec.core.memory import MARGIN
from offspec.draft.forward import HEAD_ROWS
from offspec.draft.heads.base import OpenedHead
from offspec.draft.open import Drafts
from offspec.model import device as devices
from offspec.model.experts import scratch_bytes
from offspec.model.loaded import LoadedModel
from offspec.model.recurrence import snapshots
from offspec.model.runner import CHUNK, PASS_ROWS, SHARED_PROMPT_ROWS, SMALL_CHUNK
from offspec.model.tokenizer import TextCodec
from offspec.plan.draft_memory import (
    DraftMode,
    Held,
    draft_bytes,
    draft_rows,
    embedding_bytes,
    loading_bytes,
    most_width,
    tree_nodes,
    unpacks,
)
from offspec.plan.model_sizes import expert_sizes
from offspec.plan.placement import ExpertNeeds, Needs, divide, placement_fits
from offspec.sampling.noise import CACHED_ROWS
from offspec_planners.placement import Placement, Tier, cpu_layers
from offspec_planners.plan import MODEL_MODES, Part, Plan

UNROUNDED: DraftBits = 16
LEAST_BUDGET = 16  # nodes that there must be room for beside a draft
LOOKED_UP = {"cpu": 64, "cuda": 128}  # nodes where lookups are by themselves, which take no time to draft

_SUBSTITUTE_BITS: tuple[DraftBits, ...] = (4, 3, 2)  # tried in turn when the caller does not say
_SEQUENCES = (8, 4, 2)  # tried in turn when the caller does not say
_DISPLACED = 0.05  # of the layers that sequences may take the place of: most of a pass is its trip
_CONTEXTS = (4096, 2048, 1024, 512)  # tried in turn when the caller does not say
_CPU = torch.device("cpu")
_CONVERSATION = 2048  # tokens that some turns of a conversation take


@dataclass(frozen=True, slots=True)
class Fit:
    """Division of memory that was decided.

    Args:
        context: Tokens of prompt and answer together.
        draft_mode: How the draft is held.
        placement: Tier of each layer and of the head.
        chunk: Rows of a prompt that run together.
        draft_bits: Bits of the draft's matrices, 16 where they are not rounded, or there is no draft.
    """

    context: int
    draft_mode: DraftMode
    placement: Placement
    chunk: int = CHUNK
    draft_bits: DraftBits = UNROUNDED

    @classmethod
    def of_plan(cls, plan: Plan) -> "Fit":
        """Division of memory that a plan records."""
        mode, bits = cast(DraftMode, plan.draft_mode), cast(DraftBits, plan.draft_bits)
        return cls(plan.context, mode, plan.placement, plan.chunk, bits)

    @property
    def held(self) -> Held:
        """Draft mode and bits."""
        return self.draft_mode, self.draft_bits

    @property
    def drafts_with_model(self) -> bool:
        """Whether memory is set aside for a model that drafts."""
        return self.draft_mode in MODEL_MODES


@dataclass(frozen=True, slots=True)
class Opened:
    """A target and its drafters, with their headers read, and the memory available for them.

    Args:
        config: Settings, with the sources that "auto" resolved to.
        target: The model to run.
        target_print: Fingerprint of the target.
        drafts: Models and heads that draft for the target.
        memory: Bytes of RAM for the process.
        vram: Bytes of a device with memory of its own, None where the target is computed in RAM.
        more_vram: Bytes of each further GPU.
        runtime: Bytes that the process takes without any weights.
        asked: Value of `draft`.
        codec: The target's tokenizer, where the models are to be loaded.
    """

    config: EngineConfig
    target: LoadedModel
    target_print: str
    drafts: Drafts
    memory: int
    vram: int | None
    runtime: int
    asked: str
    codec: TextCodec | None = None
    more_vram: tuple[int, ...] = ()

    @property
    def draft(self) -> LoadedModel | None:
        """The drafter that is a model, if there is one."""
        return self.drafts.model

    @property
    def heads(self) -> tuple[OpenedHead, ...]:
        """Drafters that are heads instead of models."""
        return tuple(self.drafts.heads.values())

    @property
    def draft_print(self) -> str:
        """Fingerprint of the main drafter, whatever bits it has; "none" without one."""
        return self.drafts.fingerprint

    @property
    def embeds(self) -> bool:
        """Whether a head looks its tokens up in the target's embedding, which then stays in RAM."""
        return any(head.embeds for head in self.heads)

    def alone(self) -> "Opened":
        """The target by itself."""
        return replace(self, drafts=Drafts())

    def close(self) -> None:
        """Close files and free what was loaded."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()

    def fit(self, config: EngineConfig, share: float = 1.0, *, held: Held | None = None) -> Fit:
        """The first arrangement that fits: the best draft, then the longest context; see `_choices`.

        Args:
            config: Settings whose budget and width are the most that will be used.
            share: Size of each layer, as a part of what it is.
            held: How the draft is held, whatever the settings say. None: by the settings.

        Raises:
            CapacityError: Nothing fits.
            RequestError: A context that is over the model's.
        """
        failures = list[CapacityError]()
        for way, context in _choices(self, config):
            for caches in self._cache_tiers(config):
                try:
                    return self._arranged(config, held or way, context, caches, share)
                except CapacityError as error:
                    failures.append(error)
        # What fails in RAM would do on the device.
        raise min(failures, key=lambda error: (error.given == self.vram, error.needed))

    def _cache_tiers(self, config: EngineConfig) -> tuple[Tier, ...]:
        """Tiers that the target's KV cache may be in: RAM only for a context that was asked for."""
        one = self.vram is not None and not self.more_vram and not config.cpu_layers  # computes all layers
        one = one and config.least_sequences == 1  # to which the windows belong
        moves = one and config.context is not None and self.target.caches_move
        return (Tier.DEVICE, Tier.HOST) if moves else (Tier.DEVICE,)

    def _arranged(self, config: EngineConfig, held: Held, context: int, caches: Tier, share: float) -> Fit:
        """With the draft held in this way, and caches in this tier. Raises CapacityError."""
        found: Fit | None = None
        failure: CapacityError | None = None
        cpu = cpu_layers(len(self.target.layers), config.cpu_layers or 0)
        for chunk in (CHUNK, SMALL_CHUNK):
            needs = _needs(self, config, held, context, chunk, caches, cpu)
            try:
                needs = needs.scaled(share)
                placed = divide(self.memory, needs, self.vram, cpu_experts=config.experts == "cpu")
                placement = replace(placed, caches=caches)
            except CapacityError as error:
                if failure is None or error.needed < failure.needed:
                    failure = error
                continue
            # Where not even one layer stays, a smaller chunk may make room for one, a slot or the head.
            if found is None or placement != found.placement:
                found = Fit(context, held[0], placement, chunk, held[1])
            if found.placement.resident:
                break
        if found is not None:
            return found
        assert failure is not None
        raise failure

    def holds(self, config: EngineConfig, fit: Fit) -> bool:
        """Whether an arrangement that was made before fits."""
        modes = [*_modes(self, config), _undrafted(self)]  # a plan may leave the draft out
        if len(fit.placement.tiers) != len(self.target.layers) or fit.held not in modes:
            return False
        if fit.context > self.target.skeleton.context_length:
            return False
        if fit.placement.caches not in (
            Tier.DEVICE,
            *self._cache_tiers(replace(config, context=fit.context)),
        ):
            return False
        needs = self._needed_by(config, fit)
        if fit.placement.head is not Tier.DEVICE and not needs.head:
            return False
        return placement_fits(self.memory, needs, fit.placement, self.vram)

    def _needed_by(self, config: EngineConfig, fit: Fit) -> Needs:
        placed = fit.placement
        cpu = placed.layers(Tier.CPU)
        return _needs(self, config, fit.held, fit.context, fit.chunk, placed.caches, cpu)

    def unpacks(self, config: EngineConfig, fit: Fit) -> bool:
        """Whether there is room to unpack a packed target as it is loaded, all of which then stays.

        Its passes then need not, which is worth more than anything else that the room could hold.
        """
        target = self.target
        stays = len(fit.placement.resident) == len(target.layers) and fit.placement.head is Tier.DEVICE
        stays = stays and not fit.placement.by_need
        if not target.is_packed or not stays:
            return False
        needs = self._needed_by(config, fit)
        needs = replace(needs, layers=target.held_bytes, extra=target.held_extra)
        return placement_fits(self.memory, needs, fit.placement, self.vram)

    def sequences(self, config: EngineConfig) -> int:
        """Number of sequences that fit with the same draft and context, and hardly a layer less in memory."""
        wanted = replace(config, budget=config.budget or LEAST_BUDGET)
        alone = self.fit(replace(wanted, sequences=1))
        for count in _SEQUENCES:
            with suppress(CapacityError):
                fit = self.fit(replace(wanted, sequences=count))
                lost = len(alone.placement.resident) - len(fit.placement.resident)
                same = (fit.context, fit.held) == (alone.context, alone.held)
                if same and lost <= _DISPLACED * len(self.target.layers):
                    return count
        return 1

    def parts(self, config: EngineConfig, fit: Fit) -> tuple[Part, ...]:
        """All that takes room under an arrangement, and of what stays on disk."""
        target, placement, apart = self.target, fit.placement, self.target.device.type != "cpu"
        behind = placement.host_expert_slots
        needs = self._needed_by(config, fit).with_expert_slots(placement.expert_slots, behind)
        layers = target.held_bytes if self.unpacks(config, fit) else needs.layers
        head = target.head_stored_bytes if placement.head is not Tier.DEVICE else 0
        slot = max(*needs.layers, target.head_block_bytes if head else 0)
        found = [("Python and libraries", Tier.HOST if apart else Tier.DEVICE, needs.runtime + MARGIN)]
        below = (Tier.CPU, Tier.HOST, Tier.DISK)
        found += [("layers", tier, sum(layers[layer] for layer in placement.layers(tier))) for tier in below]
        first, *others = [
            (
                sum(layers[i] for i in placement.resident if placement.gpu_of(i) == gpu),
                needs.cache * sum(tier is not Tier.CPU for tier in placement.tiers_on(gpu)),
            )
            for gpu in range(1 + len(self.more_vram))
        ]
        found += [
            ("layers", Tier.DEVICE, first[0]),
            ("head", placement.head, head or target.head_bytes),
            ("norms", Tier.DEVICE, needs.rest - target.head_bytes),
            ("caches", Tier.DEVICE, needs.caches - needs.cached + first[1] if others else needs.caches),
            ("caches", Tier.HOST, needs.hosted),
            ("draft", Tier.DEVICE, needs.draft),
            ("the draft's embedding", Tier.HOST, needs.host),
            ("scratch", Tier.DEVICE, needs.scratch + (needs.logits if head else 0) + max(needs.extra)),
            ("slots", Tier.DEVICE, placement.slots * slot),
            ("experts", Tier.DEVICE, needs.slots),
            ("experts", Tier.HOST, needs.behind),
            ("experts", Tier.DISK, target.experts.nbytes if placement.by_need else 0),
            ("staging slots", Tier.HOST, placement.staging * slot * placement.gpu_count),
            ("caches and scratch", Tier.CPU, needs.beside),
            ("the device's own share", Tier.DEVICE, needs.device_runtime),
        ]
        parts = [Part(what, tier, size) for what, tier, size in found if size > 0]
        for gpu, (own, caches) in enumerate(others, 1):
            scratch = self.more_vram[gpu - 1] - needs.more[gpu - 1] - needs.device_runtime + max(needs.extra)
            slots = placement.slots * slot if any(tier.streams for tier in placement.tiers_on(gpu)) else 0
            names = ("layers", "caches", "scratch", "slots", "the device's own share")
            sizes = (own, caches, scratch, slots, needs.device_runtime)
            parts += [
                Part(what, Tier.DEVICE, size, gpu) for what, size in zip(names, sizes, strict=True) if size
            ]
        return tuple(parts)

    def cache_bytes(self, config: EngineConfig, fit: Fit) -> int:
        """Bytes of the KV caches and states of all sequences, those of a draft excluded."""
        needs = self._needed_by(config, fit)
        windows = 2 * self.target.window_bytes(fit.context + tree_nodes(config)) if needs.hosted else 0
        return needs.caches - windows + needs.hosted

    def no_room(self, config: EngineConfig) -> str:
        """In a clause, why a substitute was left out, and what to do about it."""
        bits = config.draft_bits or _SUBSTITUTE_BITS[-1]
        held: Held = "packed", bits
        needed = draft_bytes(held, self.draft, config, config.context or _CONTEXTS[-1])
        needed += loading_bytes(held, self.draft)
        given, option = (self.memory, "`memory`") if self.vram is None else (self.vram, "`vram`")
        return (
            f"a {bits}-bit substitute of the target takes {format_bytes(needed)}, too much beside it in "
            f"{format_bytes(given)}: name a smaller model with `draft`, or give more {option}"
        )

    def least(self, config: EngineConfig) -> tuple[int, int | None]:
        """The smallest RAM, and the smallest device memory, with which the rest as given would still do."""
        memory = replace(self, memory=1)._needed(config)
        return memory, None if self.vram is None else replace(self, vram=1)._needed(config)

    def _needed(self, config: EngineConfig) -> int:
        try:
            self.fit(config)
        except CapacityError as error:
            return error.needed
        return 0

    def undrafted(self) -> int:
        """Nodes verified in a pass where nothing drafts: roots alone, or as many as lookups may fill."""
        config, roots = self.config, self.config.least_sequences
        if not set(LOOKUPS) & set(config.drafts):
            return roots
        if config.budget:
            return max(config.budget, roots)
        for nodes in (LOOKED_UP[self.target.device.type], LEAST_BUDGET):
            with suppress(CapacityError):
                self.fit(replace(config, budget=max(nodes, roots), width=config.width or 1))
                return max(nodes, roots)
        return roots


def _choices(opened: Opened, config: EngineConfig) -> list[tuple[Held, int]]:
    """Ways to hold a draft and lengths of the context, the most wanted first.

    A conversation wants room: a context that would soon be full is taken only where no other fits.
    """
    lengths = _contexts(config, opened.target)
    choices = [(held, length) for held in _modes(opened, config) for length in lengths]
    if config.converses:
        longest = opened.target.skeleton.context_length
        choices.sort(key=lambda choice: choice[1] < min(_CONVERSATION, longest))
    return choices


def _contexts(config: EngineConfig, target: LoadedModel) -> list[int]:
    longest = target.skeleton.context_length
    if config.context is None:
        return [length for length in _CONTEXTS if length <= longest] or [longest]
    if config.context > longest:
        raise RequestError(f"a context of {config.context} is over the model's {longest}")
    return [config.context]


def _undrafted(opened: Opened) -> Held:
    return ("head" if opened.heads else "none", UNROUNDED)


def _modes(opened: Opened, config: EngineConfig) -> list[Held]:
    """Ways to hold a draft, the most wanted first: the fastest, then the one with the most bits.

    A product with packed weights is as fast as one with their values or faster, unless it unpacks them first.
    """
    alone = _undrafted(opened)
    if opened.draft is None:
        return [alone]
    if not config.substitutes and config.draft_bits in (None, UNROUNDED):
        return [("full", UNROUNDED)]
    widths = _SUBSTITUTE_BITS if config.draft_bits is None else (config.draft_bits,)
    held: list[Held] = [("packed", bits) for bits in widths]
    if unpacks(opened.draft, widths[0]):
        held.insert(0, ("expanded", widths[0]))
    return [*held, alone] if config.substitutes else held


def _needs(
    opened: Opened,
    config: EngineConfig,
    held: Held,
    context: int,
    chunk: int,
    caches: Tier,
    cpu: tuple[int, ...],
) -> Needs:
    """Needs for memory with the draft held in this way.

    Args:
        chunk: Rows of a prompt that run together.
        caches: Tier of the target's KV cache.
        cpu: Layers that the CPU computes next to a device.
    """
    target, heads, sequences = opened.target, opened.heads, config.least_sequences
    budget, tree = config.budget or 1, tree_nodes(config)
    capacity = context + tree
    vocabulary = target.skeleton.vocab_size
    # A substitute drafts with the target's own head, and so do some that are small.
    shares_head = (config.substitutes and held[0] in MODEL_MODES) or any(head.shares_head for head in heads)
    rows = context + draft_rows(config)
    together = min(capacity, PASS_ROWS + budget)  # rows of a pass
    if sequences > 1:
        together = max(together, min(sequences * capacity, SHARED_PROMPT_ROWS + budget))
    on_cpu = sequences * target.cache_bytes(capacity, cpu)
    states = sequences * target.state_bytes(tree, snapshots.MOST)
    cached, hosted = sequences * target.cache_bytes(capacity) - on_cpu, 0
    if caches is Tier.HOST:
        cached, hosted = 2 * target.window_bytes(capacity), cached
    device_runtime = devices.RUNTIME + devices.SLACK if target.device.type == "cuda" else 0
    drawn = tree if config.verify == "sequoia" else 0  # nodes whose distributions are kept for the walk
    width = most_width(config)
    # That stay for a request, noise among them, and what scorers work in, which is there once.
    scores = (sequences * (CACHED_ROWS + drawn) + width) * 4 * vocabulary
    logits = max(2 * width, HEAD_ROWS if sequences > 1 else 0) * 4 * vocabulary  # of a draft step
    activations, unpacking = target.activation_bytes(together, capacity, chunk), target.unpacking_bytes
    # What layers carry from token to token is counted everywhere: which of them do is not known here.
    beside = target.scratch_bytes(together, capacity, chunk, _CPU) + on_cpu + states if cpu else 0
    draft, loading = draft_bytes(held, opened.draft, config, context), loading_bytes(held, opened.draft)
    looked_up = target.embedding_bytes if opened.embeds else 0
    # One is gone when the other comes, and what is free again is used again.
    if target.device.type == "cpu":
        draft, scratch = draft + looked_up, scores + max(logits + activations, loading)
    else:
        scratch = scores + max(logits, activations, loading)
    return Needs(
        runtime=opened.runtime,
        rest=target.rest_bytes,
        caches=cached + states,
        scratch=scratch + unpacking + _features_bytes(target, heads, together),
        draft=draft + sum(sequences * head.nbytes(rows) - (sequences - 1) * head.nbytes(0) for head in heads),
        layers=target.layer_bytes,
        extra=target.layer_extra,
        experts=None if cpu or opened.more_vram else _expert_needs(target, min(together, chunk)),
        head=0 if shares_head else target.head_bytes,
        block=target.head_block_bytes,
        logits=2 * max(budget, sequences, 2) * vocabulary * target.dtype.itemsize,
        device_runtime=device_runtime,
        host=looked_up + embedding_bytes(held, opened.draft) if target.device.type != "cpu" else 0,
        hosted=hosted,
        cpu=cpu,
        beside=beside,
        more=tuple(vram - device_runtime - activations - unpacking - states for vram in opened.more_vram),
        cache=sequences * target.layer_cache_bytes(capacity),
        cached=cached,
    )


def _expert_needs(target: LoadedModel, rows: int) -> ExpertNeeds | None:
    """rows: that go through a layer together."""
    experts, sizes = target.experts, expert_sizes(target)
    if sizes is None:
        return None
    hidden = target.skeleton.config.hidden_size
    scratch = scratch_bytes(rows, sizes.chosen, hidden, sizes.weights, target.dtype.itemsize)
    return ExpertNeeds(
        target.dense_bytes,
        target.dense_extra,
        experts.slot_bytes,
        experts.count,
        copied=experts.copied_bytes,
        spared=target.unpacking_bytes - target.dense_unpacking_bytes,
        beside=scratch + experts.copied_bytes,
    )


def _features_bytes(target: LoadedModel, heads: tuple[OpenedHead, ...], rows: int) -> int:
    """Bytes of the states that a pass of `rows` rows keeps aside for heads."""
    layers = {layer for head in heads for layer in head.wants.layers}
    last = any(head.wants.last for head in heads)
    hidden: int = target.skeleton.config.hidden_size
    return (len(layers) + last) * rows * hidden * target.dtype.itemsize
