"""Multi-token prediction module: one more decoder layer, trained with the target, for the token after next.

As in DeepSeek-V3 (arXiv 2412.19437, section 2.2): the norm of a token's embedding and the norm of the state
before it are joined to one state, which goes through a layer of the target's own kind and a last norm. The
result goes through the target's head, and is also the state that the next token is joined to. The module is
in the target's own checkpoint.

DeepSeek-V3, GLM-4.5: a layer after the last, `model.layers.{n}.`; its copies of the target's embedding and
head are not read. MiMo: `model.mtp_layers.0.`; Qwen3-Next and related models: `mtp.`. If a checkpoint has
several modules, one for each token ahead, the first of them predicts all.

Letters: T rows, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.tensors import Weight
from offspec.core.config import MTP
from offspec.core.errors import CheckpointError, DraftError, UnsupportedModelError
from offspec.draft.base import Drafter, Features
from offspec.draft.heads.base import LAST, OpenedHead, TargetShape
from offspec.draft.heads.state_drafter import StateBuffer, StateDrafter, StateLayer
from offspec.model.attention import TreeContext
from offspec.model.binding import Binder
from offspec.model.cache import TreeCache
from offspec.model.parts import TargetParts
from offspec.model.probe.cache_rows import measure_rows
from offspec.model.skeleton import skeleton_of
from offspec.model.weights import map_weights
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit

_TOKEN_NORM, _STATE_NORM, _JOIN, _LAST_NORM, _LAYER = "token_norm", "state_norm", "join", "norm", "layers.0"
_EXPERTS = f"{_LAYER}.mlp.experts."


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of a module's parts in a model family.

    prefix: prefix of all names, with {n} for the number of the target's layers; parts: the family's name of
    each part outside the layer; layer: prefix of names in the layer, after `prefix`; left: names that are not
    read. tokens_first: whether embeddings precede states when both are joined.
    """

    prefix: str
    parts: Mapping[str, str]
    layer: str = ""
    left: tuple[str, ...] = ()
    tokens_first: bool = True

    def tensors(self, stored: Mapping[str, Weight], layers: int) -> dict[str, Weight]:
        """Return a module's weights among a checkpoint's, by the names above; empty if there is no module."""
        prefix = self.prefix.format(n=layers)
        found: dict[str, Weight] = {}
        for name, weight in stored.items():
            inner = name.removeprefix(prefix)
            if inner != name and not inner.startswith(self.left):
                found[self._renamed(inner)] = weight
        return found if f"{_JOIN}.weight" in found else {}

    def _renamed(self, inner: str) -> str:
        for theirs, ours in self.parts.items():
            if inner.startswith(f"{theirs}."):
                return ours + inner.removeprefix(theirs)
        return f"{_LAYER}.{inner.removeprefix(self.layer)}"


LAYOUTS = (
    Layout(
        "model.layers.{n}.",
        {"enorm": _TOKEN_NORM, "hnorm": _STATE_NORM, "eh_proj": _JOIN, "shared_head.norm": _LAST_NORM},
        left=("embed_tokens.", "shared_head.head."),
    ),
    Layout(
        "model.mtp_layers.0.",
        {
            "token_layernorm": _TOKEN_NORM,
            "hidden_layernorm": _STATE_NORM,
            "input_proj": _JOIN,
            "final_layernorm": _LAST_NORM,
        },
        tokens_first=False,
    ),
    Layout(
        "mtp.",
        {
            "pre_fc_norm_embedding": _TOKEN_NORM,
            "pre_fc_norm_hidden": _STATE_NORM,
            "fc": _JOIN,
            "norm": _LAST_NORM,
        },
        layer="layers.0.",
        left=("embed_tokens.", "lm_head."),
    ),
)


def open_mtp(checkpoint: Checkpoint, target: TargetShape) -> OpenedHead | None:
    """Open the first module of a target's checkpoint; return None if it has none.

    Raises DraftError if the module cannot be run.
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
        known = StateBuffer(rows, parts.hidden_size, parts.dtype, parts.device)
        return StateDrafter(MTP, layer, LAST, known, parts.device)

    fingerprint = f"{checkpoint.fingerprint} {MTP}"
    return OpenedHead(MTP, MTP, fingerprint, lambda rows: fixed + rows * each, load, True, True)


class MtpModule:
    """The module on the meta device, and the locations of its weights.

    tensors: the stored weights, by the names above and their suffixes. Raises UnsupportedModelError,
    MissingTensorError or CheckpointError if they are not a valid module.
    """

    def __init__(
        self, config: Any, tensors: Mapping[str, Weight], dtype: torch.dtype, device: torch.device
    ) -> None:
        sparse = any(name.startswith(_EXPERTS) for name in tensors)
        skeleton = skeleton_of(_of_one_layer(config, sparse), dtype)
        self.kv_bytes_per_token = sum(measure_rows(skeleton).kept) * dtype.itemsize
        decoder, size = skeleton.decoder, int(config.hidden_size)
        last = getattr(decoder, _LAST_NORM, None)
        if last is None:
            raise UnsupportedModelError(
                f"no module is known for {config.model_type}, whose last norm differs"
            )
        decoder.set_input_embeddings(torch.nn.Identity())  # embeddings are passed in
        decoder.add_module(_TOKEN_NORM, copy.deepcopy(last))
        decoder.add_module(_STATE_NORM, copy.deepcopy(last))
        decoder.add_module(_JOIN, torch.nn.Linear(2 * size, size, bias=False, device="meta", dtype=dtype))
        self.decoder: Any = decoder
        self._binder = Binder(decoder, "mtp", map_weights(decoder, tensors), device)
        self._device = device

    @property
    def nbytes(self) -> int:
        """Bytes of its weights once they are loaded."""
        return self._binder.kept_bytes

    def load(self) -> None:
        """Read the weights. Raises StreamError, CapacityError, CheckpointError if they are damaged."""
        reader = DirectReader()
        try:
            memory = read_unit(self._binder.layout, reader).tensor
            self._binder.bind(self._binder.materialize(memory))
        finally:
            reader.close()
        self.decoder.to(self._device)

    def close(self) -> None:
        self._binder.close()


class MtpLayer(StateLayer):
    """Layer run by `StateDrafter`: a loaded module over a cache of its own, initially of `rows` positions.

    tokens_first: whether embeddings precede states when both are joined.
    """

    def __init__(self, module: MtpModule, tokens_first: bool, parts: TargetParts, rows: int) -> None:
        self._module, self._tokens_first, self._parts = module, tokens_first, parts
        self.cache = TreeCache(1, rows)
        self._owns = True  # of the weights

    def fork(self) -> "MtpLayer":
        twin = copy.copy(self)
        twin.cache, twin._owns = self.cache.empty_copy(), False
        return twin

    def states(self, features: Features) -> torch.Tensor:
        """Return the target's states [n, H], after its last norm, like the layer's own states."""
        return features.last

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, context: TreeContext) -> torch.Tensor:
        decoder = self._module.decoder
        pair = [decoder.token_norm(self._parts.embed(tokens)), decoder.state_norm(states)]
        joined = decoder.join(torch.cat(pair if self._tokens_first else pair[::-1], dim=-1))
        start = self.cache.rows[0].filled - context.prefix
        out = decoder(
            inputs_embeds=joined[None],
            position_ids=context.position[start : start + len(tokens)][None],
            past_key_values=self.cache,
            use_cache=True,
            tree=context,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._parts.project(states)

    def close(self) -> None:
        """Drop the weights, if this layer owns them, and the cache."""
        if self._owns:
            self._module.close()
        self.cache = TreeCache(1, 0)


def _of_one_layer(config: Any, sparse: bool) -> Any:
    """Return the target's configuration reduced to one layer with full attention, with or without experts."""
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["sparse" if sparse else "dense"]
    for name, value in (
        ("first_k_dense_replace", 0 if sparse else 1),
        ("mlp_only_layers", [] if sparse else [0]),
        ("decoder_sparse_step", 1),
    ):
        if hasattr(config, name):
            setattr(config, name, value)
    config.num_hidden_layers = 1
    return config
