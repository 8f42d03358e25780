"""MLPSpeculators (Wertheimer et al. 2024, arXiv 2404.19124) as published, whose heads depend on the path.

s is the target's final hidden state at the position before the root. Stage i takes the state of a node's
parent and the node's token to the node's own state, s <- GELU(LN_i(P_i s + r E_i[token])), and predicts its
children from it. r weighs the two terms so that the state's share of the variance halves over all stages.

Tensor names, where i counts stages, optionally prefixed by "speculator.": `emb.{i}.weight`,
`proj.{i}.weight`, `head.{i}.weight`, `ln.{i}.weight` and `.bias`. If weights are tied, all stages use those
of stage 0 except for the projection: stage 0 projects the target's states, and the others share the
projection of stage 1.

Letters: W nodes, H hidden size, I inner size, V vocabulary.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from offspec.checkpoint.folder import CONFIG
from offspec.core.errors import DraftError
from offspec.draft.base import Children, Scorer, score_children
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.files import HeadFiles
from offspec.draft.heads.last_state import LastStateDrafter, gather_children
from offspec.model.parts import TargetParts
from offspec.sampling.token_tree import ROOT

_PREFIX = "speculator."
_PARTS = ("emb.0.weight", "proj.0.weight", "head.0.weight", "ln.0.weight")
_MOST_STAGES = 64
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: embedding [V, I], projection [I, H or I], output [V, I], norm's weight and bias [I]."""

    embedding: torch.Tensor
    projection: torch.Tensor
    output: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def states(self, before: torch.Tensor, tokens: torch.Tensor, ratio: float) -> torch.Tensor:
        """Map states [W, H or I] of the parents and tokens [W] to states [W, I]."""
        mixed = F.linear(before, self.projection).add_(F.embedding(tokens, self.embedding), alpha=ratio)
        return F.gelu(_normed(mixed) * self.scale + self.shift)


def recognizes(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a checkpoint is an MLPSpeculator."""
    if config.get("model_type") == "mlp_speculator":
        return True
    return any(all(prefix + part in names for part in _PARTS) for prefix in ("", _PREFIX))


def opened(files: HeadFiles, target: TargetShape) -> OpenedHead:
    """Open and check the stages; sizes are those of the tensors, whatever config.json contains.

    Raises MissingTensorError if a stage lacks a part, DraftError if the stages are for another target.
    """
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in files.names) else ""
    count = _stage_count(files, prefix)
    tied = files.config.get("tie_weights")
    if not isinstance(tied, bool):
        tied = count > 1 and f"{prefix}head.1.weight" not in files.names
    stages = tuple(_stage(prefix, index, tied) for index in range(count))
    _, first, output, *_ = stages[0]
    inner, size = files.matrix(first)
    files.check_hidden(first, size, target)
    rows = files.matrix(output)[0]
    files.check_vocabulary(output, rows, target)
    for index, (embedding, projection, output, scale, shift) in enumerate(stages):
        files.expect(projection, inner, inner if index else size)
        files.expect(embedding, rows, inner)
        files.expect(output, rows, inner)
        files.expect(scale, inner)
        files.expect(shift, inner)
    names = {name for stage in stages for name in stage}
    name, nbytes = f"mlp_speculator ({len(stages)} heads)", files.elements(names) * target.dtype.itemsize

    def load(parts: TargetParts, rows: int) -> MLPDrafter:
        weights = {name: files.weight(name, parts.dtype, parts.device) for name in names}
        ready = [Stage(*(weights[name] for name in stage)) for stage in stages]
        return MLPDrafter(name, ready, files.config.get("scale_input") is True)

    return OpenedHead("mlp_speculator", name, files.fingerprint, lambda rows: nbytes, load)


def _stage_count(files: HeadFiles, prefix: str) -> int:
    """Return n_predict, which tied weights do not show; else the number of output matrices."""
    said = files.config.get("n_predict")
    if said is None:
        said = next(i for i in range(_MOST_STAGES + 1) if f"{prefix}head.{i}.weight" not in files.names)
    if type(said) is not int or not 0 < said <= _MOST_STAGES:
        raise DraftError(
            f"{files.place} is an MLPSpeculator of n_predict = {str(said)[:40]}, which is no number of "
            f"heads: correct its {CONFIG}, or download it again"
        )
    return said


def _stage(prefix: str, index: int, tied: bool) -> tuple[str, ...]:
    """Return the tensor names of one stage, in the order of `Stage`."""
    own = 0 if tied else index
    projection = min(index, 1) if tied else index
    parts = f"emb.{own}.weight", f"proj.{projection}.weight", f"head.{own}.weight"
    return tuple(prefix + part for part in (*parts, f"ln.{own}.weight", f"ln.{own}.bias"))


class MLPDrafter(LastStateDrafter):
    """Drafts with the stages of an MLPSpeculator. scale_input: whether the first state is normalized."""

    def __init__(self, name: str, stages: Sequence[Stage], scale_input: bool) -> None:
        super().__init__(name)
        self._stages = tuple(stages)
        state = math.pow(0.5, 0.5 / len(stages))
        self._ratio = math.sqrt((1 - state**2) * len(stages[0].projection) / 2) / state  # r
        self._scale_input = scale_input

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        start = self._before_root()
        depths: list[int] = candidates.depth[nodes].tolist()
        asked = [i for i, depth in enumerate(depths) if depth < len(self._stages)]
        if start is None or not asked:
            return Children.none(len(nodes))
        logits = start.new_empty(len(asked), len(self._stages[0].output))
        for depth, stage in enumerate(self._stages):  # level by level: one call may contain a chain
            level = [row for row, i in enumerate(asked) if depths[i] == depth]
            if level:
                states = self._advance(candidates, [nodes[asked[row]] for row in level], stage, start)
                logits[level] = F.linear(states, stage.output)
        found = score_children(scorer, logits, candidates, [nodes[i] for i in asked], self._root)
        place = {i: row for row, i in enumerate(asked)}
        return gather_children(found, [place.get(i, -1) for i in range(len(nodes))])

    def _advance(
        self, candidates: GrowingTree, nodes: Sequence[int], stage: Stage, start: torch.Tensor
    ) -> torch.Tensor:
        """Compute the states [W, I] of nodes of one level, which are kept for their children."""
        if nodes[0] == ROOT:
            before = (_normed(start) / math.sqrt(2) if self._scale_input else start)[None]
        else:
            before = torch.stack([self._of_tree[parent] for parent in candidates.parent[nodes].tolist()])
        last = len(stage.embedding) - 1  # the target's vocabulary may be padded beyond this one
        tokens = torch.from_numpy(candidates.token[nodes]).clamp_(max=last).to(before.device)
        states = stage.states(before, tokens, self._ratio)
        self._of_tree |= zip(nodes, states, strict=True)
        return states

    def close(self) -> None:
        super().close()
        self._stages = ()


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Divide [W, H] by the root mean square; no mean is subtracted, whatever the format calls it."""
    wide = x.float()  # squares overflow easily in float16
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)).to(x.dtype)
