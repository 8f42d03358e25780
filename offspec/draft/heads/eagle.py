"""EAGLE heads as published (arXiv 2401.15077, 2406.16858, 2503.01840): opened by headers, then loaded."""

import torch

from offspec.draft.base import Drafter, Wants
from offspec.draft.heads.base import LAST, OpenedHead, TargetShape
from offspec.draft.heads.eagle_files import EAGLE, EagleFormat, read_format, token_map
from offspec.draft.heads.eagle_layer import Eagle1Layer, Eagle3Layer, EagleLayer
from offspec.draft.heads.files import HeadFiles
from offspec.draft.heads.state_drafter import KnownStates, StateDrafter
from offspec.model.parts import TargetParts


def opened(files: HeadFiles, target: TargetShape) -> OpenedHead:
    """The head in `files`. Raises DraftError and CheckpointError, one line each, where it cannot serve."""
    facts = read_format(files, target)
    config, first = facts.config, facts.kind == EAGLE
    name = facts.title if first else f"{facts.title} ({facts.known} of {target.vocab_size} tokens)"
    wants = LAST if first else Wants(layers=facts.taps)
    if not first:
        token_map(files, facts, target.vocab_size)

    def nbytes(rows: int) -> int:
        pairs = 2 * config.num_key_value_heads * config.head_dim
        numbers = files.elements(facts.stored.values()) + rows * (pairs + config.hidden_size)
        return int(numbers * target.dtype.itemsize)

    def load(parts: TargetParts, rows: int) -> Drafter:
        layer = _load_layer(files, facts, parts, rows)
        known = KnownStates(rows, config.hidden_size, parts.dtype, parts.device)
        return StateDrafter(name, layer, wants, known, parts.device)

    embeds = "embed_tokens.weight" not in facts.stored
    return OpenedHead(facts.kind, name, files.fingerprint, nbytes, load, first, embeds, wants)


def _load_layer(files: HeadFiles, facts: EagleFormat, parts: TargetParts, rows: int) -> EagleLayer:
    weights = read_weights(files, facts, parts.dtype, parts.device)
    if facts.kind == EAGLE:
        return Eagle1Layer(facts.config, weights, parts, rows)
    return Eagle3Layer(
        facts.config,
        weights,
        parts,
        rows,
        taps=facts.taps,
        tokens=token_map(files, facts, parts.vocab_size),
        norm_before_residual=facts.norm_before_residual,
    )


# Products of one matrix: their results lie side by side, in this order.
_JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def read_weights(
    files: HeadFiles, facts: EagleFormat, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """All weights by short names, those of joined products by the names above.

    Raises CheckpointError where one is not finite numbers, and the errors of a damaged file.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parts in _JOINED.items():
        rows = [files.shape(facts.stored[f"{part}.weight"])[0] for part in parts]
        for kind in ("weight", "bias"):
            tensors = [facts.stored.get(f"{part}.{kind}") for part in parts]
            if stored := next(filter(None, tensors), None):
                joined = torch.zeros(sum(rows), *files.shape(stored)[1:], dtype=dtype, device=device)
                for tensor, part in zip(tensors, joined.split(rows), strict=True):
                    if tensor is not None:  # a bias that is absent is zeros
                        files.fill(tensor, part)
                weights[f"{name}.{kind}"] = joined
    inner = {part for parts in _JOINED.values() for part in parts}
    for name, stored in facts.stored.items():
        if name != "d2t" and name.rpartition(".")[0] not in inner:
            size, *rest = files.shape(stored)
            size = facts.known if name == "lm_head.weight" else size
            weights[name] = torch.empty(size, *rest, dtype=dtype, device=device)
            files.fill(stored, weights[name])
    return weights
