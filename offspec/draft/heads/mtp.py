"""Multi-token prediction modules, which some targets bring along in their own checkpoint.

DeepSeek-V3, GLM-4.5: a layer behind the last, `model.layers.{n}.`; its copies of the target's embedding and
head are left where they are. MiMo: `model.mtp_layers.0.`; Qwen3-Next and its kin: `mtp.`. Where a checkpoint
has several modules, one for each token ahead, the first of them guesses all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.tensors import Weight
from offspec.core.config import MTP
from offspec.core.errors import CheckpointError, DraftError
from offspec.draft.base import Drafter
from offspec.draft.heads.base import LAST, OpenedHead, TargetShape
from offspec.draft.heads.mtp_layer import (
    JOIN,
    LAST_NORM,
    LAYER,
    STATE_NORM,
    TOKEN_NORM,
    MtpLayer,
    MtpModule,
)
from offspec.draft.heads.state_drafter import KnownStates, StateDrafter
from offspec.model.parts import TargetParts


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family names the parts of a module.

    prefix: of all names, with {n} for the number of the target's layers; parts: the family's name of each
    part that is no part of the layer; layer: what names within the layer begin with, behind the prefix;
    left: what is not read. tokens_first: whether embeddings lie before states where both are joined.
    """

    prefix: str
    parts: Mapping[str, str]
    layer: str = ""
    left: tuple[str, ...] = ()
    tokens_first: bool = True

    def tensors(self, stored: Mapping[str, Weight], layers: int) -> dict[str, Weight]:
        """A module's weights among a checkpoint's, by the names of `mtp_layer`; none where it has none."""
        prefix = self.prefix.format(n=layers)
        found: dict[str, Weight] = {}
        for name, weight in stored.items():
            inner = name.removeprefix(prefix)
            if inner != name and not inner.startswith(self.left):
                found[self._renamed(inner)] = weight
        return found if f"{JOIN}.weight" in found else {}

    def _renamed(self, inner: str) -> str:
        for theirs, ours in self.parts.items():
            if inner.startswith(f"{theirs}."):
                return ours + inner.removeprefix(theirs)
        return f"{LAYER}.{inner.removeprefix(self.layer)}"


LAYOUTS = (
    Layout(
        "model.layers.{n}.",
        {"enorm": TOKEN_NORM, "hnorm": STATE_NORM, "eh_proj": JOIN, "shared_head.norm": LAST_NORM},
        left=("embed_tokens.", "shared_head.head."),
    ),
    Layout(
        "model.mtp_layers.0.",
        {
            "token_layernorm": TOKEN_NORM,
            "hidden_layernorm": STATE_NORM,
            "input_proj": JOIN,
            "final_layernorm": LAST_NORM,
        },
        tokens_first=False,
    ),
    Layout(
        "mtp.",
        {
            "pre_fc_norm_embedding": TOKEN_NORM,
            "pre_fc_norm_hidden": STATE_NORM,
            "fc": JOIN,
            "norm": LAST_NORM,
        },
        layer="layers.0.",
        left=("embed_tokens.", "lm_head."),
    ),
)


def open_mtp(checkpoint: Checkpoint, target: TargetShape) -> OpenedHead | None:
    """The first module of a target's checkpoint, None where it has none.

    Raises DraftError where what is there cannot be run as one.
    """
    for layout in LAYOUTS:
        if tensors := layout.tensors(checkpoint.tensors, target.layers):
            return _opened(checkpoint, target, tensors, layout.tokens_first)
    return None


def _opened(
    checkpoint: Checkpoint, target: TargetShape, tensors: Mapping[str, Weight], tokens_first: bool
) -> OpenedHead:
    try:
        outline = MtpModule(target.config, tensors, target.dtype, target.device)
    except CheckpointError as error:
        raise DraftError(
            f"the MTP module of {target.name} cannot be run ({error}): use another `draft`"
        ) from error
    fixed, each = outline.nbytes, outline.kv_bytes_per_token + target.hidden_size * target.dtype.itemsize

    def load(parts: TargetParts, rows: int) -> Drafter:
        module = MtpModule(parts.config, tensors, parts.dtype, parts.device)
        module.load()
        layer = MtpLayer(module, tokens_first, parts, rows)
        known = KnownStates(rows, parts.hidden_size, parts.dtype, parts.device)
        return StateDrafter(MTP, layer, LAST, known, parts.device)

    fingerprint = f"{checkpoint.fingerprint} {MTP}"
    return OpenedHead(MTP, MTP, fingerprint, lambda rows: fixed + rows * each, load, True, True)
