"""The weights of an EAGLE head, read to where they are used: none is held twice on the way."""

import torch

from offspec.draft.heads.eagle_files import EagleFormat
from offspec.draft.heads.files import HeadFiles

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
        for kind in ("weight", "bias"):
            tensors = [f"{part}.{kind}" for part in parts]
            if any(tensor in facts.stored for tensor in tensors):
                rows = [files.shape(facts.stored[f"{part}.weight"])[0] for part in parts]
                weights[f"{name}.{kind}"] = _joined(files, facts, tensors, rows, dtype, device)
    inner = {f"{part}.{kind}" for parts in _JOINED.values() for part in parts for kind in ("weight", "bias")}
    for name, stored in facts.stored.items():
        if name == "lm_head.weight":
            width = files.shape(stored)[1]
            weights[name] = torch.empty(facts.known, width, dtype=dtype, device=device)
            files.fill(stored, weights[name])
        elif name != "d2t" and name not in inner:
            weights[name] = files.weight(stored, dtype, device)
    return weights


def _joined(
    files: HeadFiles,
    facts: EagleFormat,
    tensors: list[str],
    rows: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Tensors below one another, of so many rows each; biases that are absent are zeros."""
    first = next(facts.stored[tensor] for tensor in tensors if tensor in facts.stored)
    joined = torch.zeros(sum(rows), *files.shape(first)[1:], dtype=dtype, device=device)
    for tensor, part in zip(tensors, joined.split(rows), strict=True):
        if tensor in facts.stored:
            files.fill(facts.stored[tensor], part)
    return joined
