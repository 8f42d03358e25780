"""From a configuration to a loaded target and draft: what fits where, and why.

Everything is opened and measured before anything is read, so that what does not fit is an error at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offspec import memory
from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.config import EngineConfig, format_bytes
from offspec.draft.lm import LMDrafter
from offspec.errors import CapacityError, DraftError, RequestError
from offspec.events import Event, LoadProgress, Notice
from offspec.grow import GrowthPolicy
from offspec.model.calibration import TEXT
from offspec.model.loaded import LoadedModel
from offspec.model.packing import packed_bytes
from offspec.text import TextCodec, load_tokenizer, same_vocabulary
from offspec_planners.placement import Placement

Notify = Callable[[Event], None]

_CONTEXTS = (4096, 2048, 1024, 512)  # tried in turn when the caller does not say


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded target, its drafter if there is one, and what was decided about them."""

    target: LoadedModel
    drafter: LMDrafter | None
    codec: TextCodec
    context: int
    placement: Placement
    memory: int


@dataclass(frozen=True, slots=True)
class _DraftChoice:
    """How the draft is held: "full" as stored, "expanded" 4-bit values at 16 bits each, "packed", "none"."""

    mode: str
    nbytes: int


def assemble(config: EngineConfig, notify: Notify) -> Assembly:
    """Open, place and load. Raises any OffspecError; on an error nothing stays open."""
    device, dtype = _device(config.device), getattr(torch, config.dtype)
    given = config.memory or int(0.9 * (memory.available_bytes() + memory.resident_bytes()))
    checkpoint = open_checkpoint(config.model, notify=notify)
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device)
    draft: LoadedModel | None = None
    try:
        codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
        if config.draft != "none" and config.budget > 1:
            draft = _open_draft(config, checkpoint, codec, target, dtype, device, notify)
        context, choice, placement = _decide(config, given, target, draft)
        if draft is not None and choice.mode == "none":
            notify(Notice(_no_room(config, given, target, draft)))
            draft = None
        capacity = context + config.budget
        target.load(placement.resident, placement.slots, capacity, _progress(notify, "Loading the target"))
        for file in sorted(target.buffered_files):
            notify(Notice(f"{file.name} is read through the page cache: its file system refuses O_DIRECT"))
        drafter = None
        if draft is not None:
            drafter = _load_draft(config, choice, draft, target, codec, context, device, notify)
        memory.trim()
        return Assembly(target, drafter, codec, context, placement, given)
    except BaseException as error:
        target.close()
        if draft is not None:
            draft.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise CapacityError(
                f"{device} has too little free memory for the head, the caches, two layers and the draft; "
                "try a smaller --context, a smaller draft or --draft none",
                needed=0,
                given=given,
            ) from error
        raise


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RequestError(f"there is no device {name!r}; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise RequestError(f"offspec runs on cpu and cuda, not on {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("this machine has no CUDA device that torch can use; use --device cpu")
    return device


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


def _decide(
    config: EngineConfig, given: int, target: LoadedModel, draft: LoadedModel | None
) -> tuple[int, _DraftChoice, Placement]:
    """Context length, how the draft is held, and where the layers go. Raises CapacityError."""
    longest = target.skeleton.context_length
    if config.context is not None:
        if config.context > longest:
            raise RequestError(f"a context of {config.context} is over the model's {longest}")
        contexts = [config.context]
    else:
        contexts = [length for length in _CONTEXTS if length <= longest] or [longest]
    memory.trim()
    runtime, failure = memory.resident_bytes(), None
    for mode in _modes(config, draft):
        for context in contexts:
            choice = _DraftChoice(mode, _draft_bytes(mode, draft, config, context))
            try:
                placement = memory.divide(given, _needs(config, target, choice, context, runtime))
                if target.device.type != "cpu":
                    # Memory of the device is not budgeted yet, so nothing is kept there but the ring.
                    placement = Placement((), max(placement.slots, 2))
                return context, choice, placement
            except CapacityError as error:
                if failure is None or error.needed < failure.needed:
                    failure = error
    assert failure is not None
    raise failure


def _modes(config: EngineConfig, draft: LoadedModel | None) -> tuple[str, ...]:
    if draft is None:
        return ("none",)
    if config.draft == "auto":
        return ("expanded", "packed", "none")
    return ("expanded", "packed") if config.draft_bits == 4 else ("full",)


def _needs(
    config: EngineConfig, target: LoadedModel, choice: _DraftChoice, context: int, runtime: int
) -> memory.Needs:
    capacity = context + config.budget
    vocabulary = target.skeleton.vocab_size
    return memory.Needs(
        runtime=runtime,
        rest=target.rest_bytes,
        caches=target.cache_bytes(capacity),
        scratch=target.scratch_bytes(capacity, capacity) + (64 + 3 * config.width) * 4 * vocabulary,
        draft=choice.nbytes,
        layers=target.layer_bytes,
        extra=target.layer_extra,
    )


def _draft_bytes(mode: str, draft: LoadedModel | None, config: EngineConfig, context: int) -> int:
    if draft is None or mode == "none":
        return 0
    rows = context + draft_rows(config)
    shared = config.draft == "auto"
    fixed = draft.cache_bytes(rows) + (0 if shared else draft.rest_bytes)
    if mode != "full":
        fixed += max(draft.layer_bytes) + max(draft.layer_extra)  # the layer that is being rounded
    if mode == "full":
        return fixed + sum(
            size + extra for size, extra in zip(draft.layer_bytes, draft.layer_extra, strict=True)
        )
    if mode == "expanded":
        return fixed + sum(elements * draft.dtype.itemsize for elements in draft.layer_elements)
    # One layer is unpacked at a time.
    unpacked = max(draft.layer_elements) * draft.dtype.itemsize
    return fixed + sum(packed_bytes(elements) for elements in draft.layer_elements) + unpacked


def _no_room(config: EngineConfig, given: int, target: LoadedModel, draft: LoadedModel) -> str:
    needed = _draft_bytes("packed", draft, config, _CONTEXTS[-1])
    return (
        f"no draft: a 4-bit substitute of the target takes {format_bytes(needed)}, too much beside it in "
        f"{format_bytes(given)}; name a smaller model with --draft, or give more --memory"
    )


def _load_draft(
    config: EngineConfig,
    choice: _DraftChoice,
    draft: LoadedModel,
    target: LoadedModel,
    codec: TextCodec,
    context: int,
    device: torch.device,
    notify: Notify,
) -> LMDrafter:
    rows = context + draft_rows(config)
    if choice.mode == "full":
        name = Path(config.draft).name
        draft.load(range(len(draft.layers)), 0, rows, _progress(notify, "Loading the draft"))
        return LMDrafter(name, draft.tree_model, device, draft.close)
    shared = config.draft == "auto"
    stage = "Making a 4-bit substitute of the target" if shared else "Rounding the draft to 4 bits"
    draft.load_packed(
        choice.mode == "expanded",
        rows,
        lambda done, total: notify(LoadProgress(stage, done, total, "layers")),
        calibration_ids(codec, min(rows, draft.skeleton.context_length)),
        target.rest_tensors if shared else None,
    )
    name = "substitute (4-bit)" if shared else f"{Path(config.draft).name} (4-bit)"
    return LMDrafter(name, draft.tree_model, device, draft.close)


def draft_rows(config: EngineConfig) -> int:
    """Rows that a growing tree may take in the draft's cache."""
    return GrowthPolicy(config.budget, config.width).max_expanded


def calibration_ids(codec: TextCodec, most: int) -> list[int]:
    """The text that rounding is calibrated on, in the model's own tokens."""
    return codec.encode_prompt(TEXT, raw=True)[:most]


def describe(assembly: Assembly) -> dict[str, Any]:
    """What was decided, for logs and benches."""
    return {
        "context": assembly.context,
        "resident_layers": len(assembly.placement.resident),
        "streamed_layers": len(assembly.target.layers) - len(assembly.placement.resident),
        "slots": assembly.placement.slots,
        "memory": assembly.memory,
    }
