"""Loading the draft sources of a target, once their fit in memory is decided."""

from collections.abc import Callable
from pathlib import Path

from offspec.core.config import SELF_DRAFT, EngineConfig
from offspec.core.events import LoadProgress
from offspec.draft.base import Drafter
from offspec.draft.cross_vocab.drafter import CrossVocabDrafter, Retokenizer
from offspec.draft.kinds import LOOKUPS
from offspec.draft.lm import LMDrafter
from offspec.draft.mix.sources import Sources
from offspec.draft.open import Drafts, Notify
from offspec.model.cache import TreeCache
from offspec.model.fused.model import FusedModel
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.model.quantize.calibration import TEXT
from offspec.model.quantize.draft_cache import LEAST, QuantizedDraftCache
from offspec.model.recurrence import snapshots
from offspec.model.row_counts import RowCounts
from offspec.model.tokenizer import TextCodec
from offspec.plan.fit import Fit
from offspec.plan.needs import draft_rows
from offspec_planners.placement import Placement


def load_drafts(
    drafts: Drafts, config: EngineConfig, fit: Fit, target: LoadedModel, codec: TextCodec, notify: Notify
) -> Sources:
    """Load drafters for a loaded target, and lookups. Raises any OffspecError; on an error none stays
    open.
    """
    found: dict[str, Drafter] = {}
    try:
        for name in drafts.names:
            if name in drafts.heads:
                rows = fit.context + draft_rows(config)
                found[name] = drafts.heads[name].load(TargetParts(target), rows)
            elif drafts.model is not None:
                inner = _load_model(name, drafts, config, fit, target, codec, notify)
                found[name] = _translated(inner, drafts, target, codec)
    except BaseException:
        for drafter in found.values():
            drafter.close()
        raise
    return Sources(found, {name: make() for name, make in LOOKUPS.items()})


def _load_model(
    name: str,
    drafts: Drafts,
    config: EngineConfig,
    fit: Fit,
    target: LoadedModel,
    codec: TextCodec,
    notify: Notify,
) -> LMDrafter:
    """codec: the target's tokenizer, which the draft uses if it has no other."""
    draft = drafts.model
    assert draft is not None
    rows = fit.context + draft_rows(config)
    if fit.draft_mode == "full":
        everywhere = Placement.in_memory(len(draft.layers), range(len(draft.layers)), 0)
        progress = bytes_progress(notify, "Loading the draft")
        counts = RowCounts()  # a draft may have any number of rows
        draft.load(
            everywhere,
            rows,
            progress,
            fit.chunk,
            unpacked=True,
            row_counts=counts,
            context=fit.context,
            embedding_in_ram=True,
        )
        return _drafter(Path(name).name, draft, rows, notify)
    shared = name == SELF_DRAFT
    bits = fit.draft_bits
    stage = (
        f"Quantizing the target to {bits} bits as its draft"
        if shared
        else f"Quantizing the draft to {bits} bits"
    )
    ids = calibration_ids(drafts.codec or codec, min(rows, draft.skeleton.context_length))
    kept = QuantizedDraftCache(
        config.model if shared else name,
        drafts.model_fingerprint,
        bits,
        [binder.parameters for binder in draft.layers],
        (config.dtype, draft.device.type, ids),
        notify,
    )
    draft.load_quantized(
        bits,
        fit.draft_mode == "expanded",
        rows,
        lambda done, total: notify(LoadProgress(stage, done, total, "layers")),
        ids,
        target.rest_tensors if shared else None,
        fit.chunk,
        fit.context,
        kept=kept if kept.nbytes >= LEAST else None,
    )
    cache = target.tree_model.cache if shared else None
    return _drafter(f"{Path(name).name} ({bits}-bit)", draft, rows, notify, cache)


def _translated(drafter: LMDrafter, drafts: Drafts, target: LoadedModel, codec: TextCodec) -> Drafter:
    """Wrap a drafter of another vocabulary so that it drafts in the target's tokens."""
    if drafts.vocab is None or drafts.codec is None:
        return drafter
    reading = Retokenizer(drafts.vocab, codec.tokenizer, drafts.codec.tokenizer)
    return CrossVocabDrafter(drafter, drafts.vocab, reading, target.device)


def _drafter(
    name: str, draft: LoadedModel, rows: int, notify: Notify, target: TreeCache | None = None
) -> LMDrafter:
    """Return a drafter over a loaded draft, fused if possible. target: cache of the target it is quantized
    from.
    """
    lean = draft.fused_model(rows, notify)
    if lean is None:
        draft.tree_model.cache.snapshots.most = snapshots.OF_DRAFT
        draft.tree_model.cache.block.allocate()
    return LMDrafter(name, lean or draft.tree_model, draft.device, lambda: _release(lean, draft), target)


def _release(lean: FusedModel | None, draft: LoadedModel) -> None:
    if lean is not None:
        lean.close()
    draft.close()


def calibration_ids(codec: TextCodec, most: int) -> list[int]:
    """Return the calibration text for quantization, in the model's own tokens."""
    return codec.encode_prompt(TEXT, raw=True)[:most]


def bytes_progress(notify: Notify, stage: str) -> Callable[[int, int], None]:
    """Return a callback that reports the bytes read."""
    return lambda done, total: notify(LoadProgress(stage, done, total, "bytes"))
