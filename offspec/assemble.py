"""From a configuration to a loaded target and draft: what fits where, and why.

Everything is opened and measured before anything is read, so that what does not fit is an error at once.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offspec import device as devices
from offspec import memory
from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.config import EngineConfig
from offspec.draft.lm import DraftModel, LMDrafter
from offspec.errors import CapacityError, DraftError
from offspec.events import Event, LoadProgress, Notice
from offspec.fit import Fit, decide, draft_rows, holds, no_room, parts, unpacks
from offspec.model.cache import TreeCache
from offspec.model.calibration import TEXT
from offspec.model.lean import LeanModel
from offspec.model.loaded import LoadedModel
from offspec.text.codec import TextCodec, load_tokenizer, same_vocabulary
from offspec.timeline import OFF, Timeline
from offspec_planners.placement import Placement, Tier

Notify = Callable[[Event], None]

_opened: weakref.WeakSet[LoadedModel] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Opened:
    """A target and a draft whose headers were read, and the memory there is for them.

    target_print, draft_print: what tells them from others, whatever bits the draft is rounded to; "none"
    where nobody drafts. memory: bytes of RAM for the process; vram: of a device with memory of its own;
    runtime: what the process takes without any weights.
    """

    config: EngineConfig
    target: LoadedModel
    target_print: str
    draft: LoadedModel | None
    draft_print: str
    memory: int
    vram: int | None
    runtime: int
    codec: TextCodec | None = None  # only where the models are to be loaded

    def close(self) -> None:
        """Close files and free what was loaded."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()

    def fit(self, config: EngineConfig, share: float = 1.0) -> Fit:
        """What fits where with these settings, were the target's layers `share` times as large as they are.

        Raises CapacityError, RequestError.
        """
        return decide(config, self.memory, self.vram, self.target, self.draft, self.runtime, share)

    def holds(self, config: EngineConfig, fit: Fit) -> bool:
        """Whether an arrangement that was made before fits."""
        return holds(fit, config, self.memory, self.vram, self.target, self.draft, self.runtime)

    def unpacks(self, config: EngineConfig, fit: Fit) -> bool:
        """Whether there is room to unpack a packed target, all of which stays, as it is loaded."""
        return unpacks(fit, config, self.memory, self.vram, self.target, self.draft, self.runtime)

    def parts(self, config: EngineConfig, fit: Fit) -> tuple[tuple[str, str, int], ...]:
        """(what, tier, bytes) of all that takes room under an arrangement, and of what stays on disk."""
        layers = self.target.held_bytes if self.unpacks(config, fit) else self.target.layer_bytes
        return parts(config, self.target, self.draft, fit, self.runtime, layers)

    def least(self, config: EngineConfig) -> tuple[int, int | None]:
        """The smallest RAM, and the smallest device memory, with which the rest as given would still do."""
        return (
            self._needed(config, 1, self.vram),
            None if self.vram is None else self._needed(config, self.memory, 1),
        )

    def _needed(self, config: EngineConfig, memory: int, vram: int | None) -> int:
        try:
            decide(config, memory, vram, self.target, self.draft, self.runtime)
        except CapacityError as error:
            return error.needed
        return 0


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded target, its drafter if there is one, and what was decided about them."""

    target: LoadedModel
    drafter: LMDrafter | None
    codec: TextCodec
    context: int
    placement: Placement
    memory: int
    vram: int | None = None


def open_models(config: EngineConfig, notify: Notify, timeline: Timeline = OFF) -> Opened:
    """Open what a configuration names. Raises any OffspecError; on an error nothing stays open."""
    device, dtype = devices.find_device(config.device), getattr(torch, config.dtype)
    vram = devices.claim(device, config.vram)
    given = config.memory or int(0.9 * (memory.available_bytes() + memory.resident_bytes()))
    checkpoint = _open_target(config, notify)
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device, timeline)
    try:
        codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
        draft, draft_print = None, "none"
        if config.draft != "none" and config.budget != 1:
            draft, draft_print = _open_draft(config, checkpoint, codec, target, dtype, device, notify)
    except BaseException:
        target.close()
        raise
    for model in (target, draft):
        if model is not None:
            model.warm_up()  # its compiled code is part of what the process takes
    gc.collect()
    memory.trim()
    runtime = memory.steady_runtime(fresh=any(model.is_loaded for model in _opened))
    _opened.update(model for model in (target, draft) if model is not None)
    return Opened(config, target, checkpoint.fingerprint, draft, draft_print, given, vram, runtime, codec)


def _open_target(config: EngineConfig, notify: Notify) -> Checkpoint:
    """What the target's name stands for: the model, or a pack of it, which is made on first use."""
    if config.quantize is None:
        return open_checkpoint(config.model, notify=notify)
    from offspec.pack import packed_model

    return packed_model(config.model, config.quantize, notify, config.memory)


def load_models(opened: Opened, config: EngineConfig, fit: Fit, notify: Notify) -> Assembly:
    """Load what was opened, as `fit` says. Raises any OffspecError; on an error all of it is closed."""
    recording = torch.is_grad_enabled()
    target, draft, codec = opened.target, opened.draft, opened.codec
    assert codec is not None
    try:
        if draft is not None and fit.draft_mode == "none":
            notify(Notice(no_room(config, opened.memory, opened.vram, draft)))
            draft = None
        capacity = fit.context + (config.budget or 1)
        target.load(
            fit.placement,
            capacity,
            _progress(notify, "Loading the target"),
            fit.chunk,
            unpacked=opened.unpacks(config, fit),
        )
        for file in sorted(target.buffered_files):
            notify(Notice(f"{file.name} is read through the page cache: its file system refuses O_DIRECT"))
        drafter = None
        if draft is not None:
            drafter = _load_draft(config, fit, draft, target, codec, notify)
        memory.trim()
        return Assembly(target, drafter, codec, fit.context, fit.placement, opened.memory, opened.vram)
    except BaseException as error:
        torch.set_grad_enabled(recording)
        opened.close()
        if devices.is_out_of_memory(error):
            raise CapacityError(
                f"{target.device} ran out of memory while loading; try a smaller --context or --budget, a "
                "smaller draft, or --draft none",
                needed=0,
                given=opened.vram or opened.memory,
            ) from error
        raise


def assemble(config: EngineConfig, notify: Notify, timeline: Timeline = OFF) -> Assembly:
    """Open and load with the budget and width of the configuration. Raises any OffspecError."""
    opened = open_models(config, notify, timeline)
    try:
        fit = opened.fit(config)
    except BaseException:
        opened.close()
        raise
    return load_models(opened, config, fit, notify)


def _progress(notify: Notify, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: notify(LoadProgress(stage, done, total, "bytes"))


def _open_draft(
    config: EngineConfig,
    checkpoint: Checkpoint,
    codec: TextCodec,
    target: LoadedModel,
    dtype: torch.dtype,
    device: torch.device,
    notify: Notify,
) -> tuple[LoadedModel, str]:
    """The draft's headers, checked against the target, and its fingerprint. Raises DraftError."""
    if config.draft == "auto":
        substitute = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device)
        return substitute, draft_print(config, checkpoint.fingerprint)
    other = open_checkpoint(config.draft, notify=notify)
    reason = same_vocabulary(codec.tokenizer, load_tokenizer(other.folder))
    if reason is not None:
        raise DraftError(
            f"{config.draft} cannot draft for {config.model}, their vocabularies differ: {reason}; "
            "name a draft of the same family, or use --draft auto"
        )
    draft = LoadedModel(other.folder, other.tensors, dtype, device)
    if draft.skeleton.vocab_size < len(codec.tokenizer):
        raise DraftError(
            f"{config.draft} knows {draft.skeleton.vocab_size} tokens, the target's tokenizer more"
        )
    return draft, draft_print(config, other.fingerprint)


def draft_print(config: EngineConfig, fingerprint: str) -> str:
    """What tells a draft from others: the model of this fingerprint, and whether it shares the target's."""
    return f"{fingerprint} substitute" if config.draft == "auto" else fingerprint


def _load_draft(
    config: EngineConfig,
    fit: Fit,
    draft: LoadedModel,
    target: LoadedModel,
    codec: TextCodec,
    notify: Notify,
) -> LMDrafter:
    rows = fit.context + draft_rows(config)
    if fit.draft_mode == "full":
        name = Path(config.draft).name
        everywhere = Placement.in_memory(len(draft.layers), range(len(draft.layers)), 0)
        progress = _progress(notify, "Loading the draft")
        draft.load(everywhere, rows, progress, fit.chunk, unpacked=True)
        return _drafter(name, draft, rows)
    shared = config.draft == "auto"
    bits = fit.draft_bits
    stage = f"Rounding the draft to {bits} bits"
    if shared:
        stage = f"Making a {bits}-bit substitute of the target"
    draft.load_packed(
        bits,
        fit.draft_mode == "expanded",
        rows,
        lambda done, total: notify(LoadProgress(stage, done, total, "layers")),
        calibration_ids(codec, min(rows, draft.skeleton.context_length)),
        target.rest_tensors if shared else None,
        fit.chunk,
    )
    name = "substitute" if shared else Path(config.draft).name
    return _drafter(f"{name} ({bits}-bit)", draft, rows, target.tree_model.cache if shared else None)


def _drafter(name: str, draft: LoadedModel, rows: int, target: TreeCache | None = None) -> LMDrafter:
    """A drafter over a loaded draft, lean where it can be; target: the cache of what it is a rounding of."""
    lean = draft.lean(rows)
    model: DraftModel = lean or draft.tree_model
    return LMDrafter(name, model, draft.device, lambda: _release(lean, draft), target)


def _release(lean: LeanModel | None, draft: LoadedModel) -> None:
    if lean is not None:
        lean.close()
    draft.close()


def calibration_ids(codec: TextCodec, most: int) -> list[int]:
    """The text that rounding is calibrated on, in the model's own tokens."""
    return codec.encode_prompt(TEXT, raw=True)[:most]


def describe(assembly: Assembly) -> dict[str, Any]:
    """What was decided, for logs and benches."""
    placement, sizes = assembly.placement, assembly.target.layer_bytes
    streamed = [i for i in range(len(sizes)) if i not in placement.resident]
    host = placement.layers(Tier.HOST)
    return {
        "context": assembly.context,
        "resident_layers": len(placement.resident),
        "host_layers": len(host),
        "disk_layers": len(placement.layers(Tier.DISK)),
        "streamed_layers": len(streamed),
        "resident_bytes": sum(sizes[i] for i in placement.resident),
        "host_bytes": sum(sizes[i] for i in host),
        "disk_bytes": sum(sizes[i] for i in placement.layers(Tier.DISK)),
        "slot_bytes": placement.slots * max((sizes[i] for i in streamed), default=0),
        "slots": placement.slots,
        "staging": placement.staging,
        "head": str(placement.head),
        "chunk": assembly.target.tree_model.chunk,
        "memory": assembly.memory,
        "vram": assembly.vram,
    }
