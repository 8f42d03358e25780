"""MLPSpeculators (Wertheimer et al. 2024, arXiv 2404.19124) as published: opened by headers, then loaded.

Their tensors, where i counts stages, perhaps behind "speculator.": `emb.{i}.weight`, `proj.{i}.weight`,
`head.{i}.weight`, `ln.{i}.weight` and `.bias`. Where weights are tied all stages have those of stage 0, but
for the projection: that of stage 0 takes the target's states, and the others share that of stage 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offspec.checkpoint.folder import CONFIG
from offspec.core.errors import DraftError
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.files import HeadFiles
from offspec.draft.heads.mlp_drafter import MLPDrafter, MLPStage
from offspec.model.parts import TargetParts

_PREFIX = "speculator."
_PARTS = ("emb.0.weight", "proj.0.weight", "head.0.weight", "ln.0.weight")
_MOST_STAGES = 64


@dataclass(frozen=True, slots=True)
class StageNames:
    """The tensors of one stage, in the order of `MLPStage`."""

    embedding: str
    projection: str
    output: str
    scale: str
    shift: str

    @property
    def all(self) -> tuple[str, ...]:
        return (self.embedding, self.projection, self.output, self.scale, self.shift)


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is an MLPSpeculator."""
    if config.get("model_type") == "mlp_speculator":
        return True
    return any(all(prefix + part in names for part in _PARTS) for prefix in ("", _PREFIX))


def opened(files: HeadFiles, target: TargetShape) -> OpenedHead:
    """Find the stages and check them; sizes are those of the tensors, whatever config.json says.

    Raises MissingTensorError where one lacks a part, DraftError where it is for another target.
    """
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in files.names) else ""
    count = _stage_count(files, prefix)
    tied = files.config.get("tie_weights")
    if not isinstance(tied, bool):
        tied = count > 1 and f"{prefix}head.1.weight" not in files.names
    stages = tuple(_stage(prefix, index, tied) for index in range(count))
    first = stages[0]
    inner, size = files.matrix(first.projection)
    files.check_hidden(first.projection, size, target)
    rows = files.matrix(first.output)[0]
    files.check_vocabulary(first.output, rows, target)
    for index, stage in enumerate(stages):
        files.expect(stage.projection, inner, inner if index else size)
        files.expect(stage.embedding, rows, inner)
        files.expect(stage.output, rows, inner)
        files.expect(stage.scale, inner)
        files.expect(stage.shift, inner)
    names = {name for stage in stages for name in stage.all}
    name, nbytes = f"mlp_speculator ({len(stages)} heads)", files.elements(names) * target.dtype.itemsize

    def load(parts: TargetParts, rows: int) -> MLPDrafter:
        weights = {name: files.weight(name, parts.dtype, parts.device) for name in names}
        ready = [MLPStage(*(weights[name] for name in stage.all)) for stage in stages]
        return MLPDrafter(name, ready, files.config.get("scale_input") is True)

    return OpenedHead("mlp_speculator", name, files.fingerprint, lambda rows: nbytes, load)


def _stage_count(files: HeadFiles, prefix: str) -> int:
    """What n_predict says, which tied weights do not show; else as many as have an output."""
    said = files.config.get("n_predict")
    if said is None:
        said = next(i for i in range(_MOST_STAGES + 1) if f"{prefix}head.{i}.weight" not in files.names)
    if type(said) is not int or not 0 < said <= _MOST_STAGES:
        raise DraftError(
            f"{files.place} is an MLPSpeculator of n_predict = {str(said)[:40]}, which is no number of "
            f"heads: correct its {CONFIG}, or download it again"
        )
    return said


def _stage(prefix: str, index: int, tied: bool) -> StageNames:
    own = 0 if tied else index
    projection = min(index, 1) if tied else index
    return StageNames(
        embedding=f"{prefix}emb.{own}.weight",
        projection=f"{prefix}proj.{projection}.weight",
        output=f"{prefix}head.{own}.weight",
        scale=f"{prefix}ln.{own}.weight",
        shift=f"{prefix}ln.{own}.bias",
    )
