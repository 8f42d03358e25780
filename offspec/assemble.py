"""From a configuration to a loaded target and draft: what fits where, and why.

Everything is opened and measured before anything is read, so that what does not fit is an error at once.
"""

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
from offspec.draft.pace import measure_steps
from offspec.errors import CapacityError, DraftError
from offspec.events import Event, LoadProgress, Notice
from offspec.fit import Fit, decide, draft_rows, no_room
from offspec.model.calibration import TEXT
from offspec.model.lean import LeanModel
from offspec.model.loaded import LoadedModel
from offspec.text import TextCodec, load_tokenizer, same_vocabulary
from offspec.timeline import OFF, Timeline
from offspec_planners.placement import Placement, Tier

Notify = Callable[[Event], None]


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


def assemble(config: EngineConfig, notify: Notify, timeline: Timeline = OFF) -> Assembly:
    """Open, place and load. Raises any OffspecError; on an error nothing stays open."""
    device, dtype = devices.find_device(config.device), getattr(torch, config.dtype)
    vram = devices.claim(device, config.vram)
    given = config.memory or int(0.9 * (memory.available_bytes() + memory.resident_bytes()))
    checkpoint = open_checkpoint(config.model, notify=notify)
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device, timeline)
    draft: LoadedModel | None = None
    recording = torch.is_grad_enabled()
    try:
        codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
        if config.draft != "none" and config.budget > 1:
            draft = _open_draft(config, checkpoint, codec, target, dtype, device, notify)
        fit = decide(config, given, vram, target, draft)
        if draft is not None and fit.draft_mode == "none":
            notify(Notice(no_room(config, given, vram, draft)))
            draft = None
        capacity = fit.context + config.budget
        target.load(fit.placement, capacity, _progress(notify, "Loading the target"), fit.chunk)
        for file in sorted(target.buffered_files):
            notify(Notice(f"{file.name} is read through the page cache: its file system refuses O_DIRECT"))
        drafter = None
        if draft is not None:
            drafter = _load_draft(config, fit, draft, target, codec, notify)
        memory.trim()
        return Assembly(target, drafter, codec, fit.context, fit.placement, given, vram)
    except BaseException as error:
        torch.set_grad_enabled(recording)
        target.close()
        if draft is not None:
            draft.close()
        if devices.is_out_of_memory(error):
            raise CapacityError(
                f"{device} ran out of memory while loading; try a smaller --context or --budget, a smaller "
                "draft, or --draft none",
                needed=0,
                given=vram or given,
            ) from error
        raise


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
) -> LoadedModel:
    """The draft's headers, checked against the target. Raises DraftError."""
    if config.draft == "auto":
        return LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device)
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
    return draft


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
        draft.load(everywhere, rows, _progress(notify, "Loading the draft"), fit.chunk)
        return _drafter(name, draft, rows, config)
    shared = config.draft == "auto"
    stage = "Making a 4-bit substitute of the target" if shared else "Rounding the draft to 4 bits"
    draft.load_packed(
        fit.draft_mode == "expanded",
        rows,
        lambda done, total: notify(LoadProgress(stage, done, total, "layers")),
        calibration_ids(codec, min(rows, draft.skeleton.context_length)),
        target.rest_tensors if shared else None,
        fit.chunk,
    )
    name = "substitute (4-bit)" if shared else f"{Path(config.draft).name} (4-bit)"
    return _drafter(name, draft, rows, config)


def _drafter(name: str, draft: LoadedModel, rows: int, config: EngineConfig) -> LMDrafter:
    """A drafter over a loaded draft, lean where it can be, its steps measured if need be."""
    lean = draft.lean(rows)
    model: DraftModel = lean or draft.tree_model
    seconds = measure_steps(model, draft.device) if config.width is None else {}
    return LMDrafter(name, model, draft.device, lambda: _release(lean, draft), seconds)


def _release(lean: LeanModel | None, draft: LoadedModel) -> None:
    if lean is not None:
        lean.close()
    draft.close()


def calibration_ids(codec: TextCodec, most: int) -> list[int]:
    """The text that rounding is calibrated on, in the model's own tokens."""
    return codec.encode_prompt(TEXT, raw=True)[:most]


def describe(assembly: Assembly) -> dict[str, Any]:
    """What was decided, for logs and benches."""
    placement = assembly.placement
    return {
        "context": assembly.context,
        "resident_layers": len(placement.resident),
        "host_layers": len(placement.layers(Tier.HOST)),
        "disk_layers": len(placement.layers(Tier.DISK)),
        "streamed_layers": len(placement.tiers) - len(placement.resident),
        "slots": placement.slots,
        "staging": placement.staging,
        "head": str(placement.head),
        "chunk": assembly.target.tree_model.chunk,
        "memory": assembly.memory,
        "vram": assembly.vram,
    }
