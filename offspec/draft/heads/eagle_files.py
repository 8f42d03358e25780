"""Format of an EAGLE head's files, in any published layout, checked against the target.

The authors' layout has EAGLE's layer under `layers.0.` and EAGLE-3's under `midlayer.`, and the layer's
configuration in config.json itself. The `speculators` format has both under `transformer_layer_config`, and
its tensors under `transformer.` and `fusion_fc.` for EAGLE, under `layers.0.` for EAGLE-3. Short names of
tensors here omit all of these prefixes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.ranges import one_line
from offspec.core.errors import DraftError
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.files import HeadFiles

EAGLE, EAGLE3 = "eagle", "eagle3"
_TITLES = {EAGLE: "EAGLE", EAGLE3: "EAGLE-3"}

_PREFIXES = ("midlayer.", "layers.0.", "transformer.")
# Stored with a head, but not used by it: `lm_head`, in an EAGLE file, is the target's.
_IGNORED = {
    "t2d",
    "lm_head.weight",
    "self_attn.rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class EagleFormat:
    """Format of a head that fits its target.

    kind: EAGLE or EAGLE3; config: a LlamaConfig of its layer; stored: name in the files by short name, for
    the tensors it computes with; taps: the target's layers whose inputs EAGLE-3 takes, in order; known: rows
    of EAGLE-3's own head, without those beyond the target's vocabulary if the head covers all of it;
    norm_before_residual: see `Eagle3Layer`.
    """

    kind: str
    config: Any
    stored: dict[str, str]
    taps: tuple[int, ...] = ()
    known: int = 0
    norm_before_residual: bool = False

    @property
    def title(self) -> str:
        return _TITLES[self.kind]


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return EAGLE or EAGLE3; None for anything else."""
    declared = config.get("speculators_model_type")
    if declared is not None:
        return declared if isinstance(declared, str) and declared in _TITLES else None
    short = {_short(name) for name in names}
    if not {"fc.weight", "self_attn.q_proj.weight"} <= short:
        return None
    named = any(name.startswith("midlayer.") for name in names)
    return EAGLE3 if named or "hidden_norm.weight" in short else EAGLE


def _short(name: str) -> str:
    if name.startswith("fusion_fc."):
        return name.removeprefix("fusion_")
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def read_format(files: HeadFiles, target: TargetShape) -> EagleFormat:
    """Read the format of the head in `files` from headers alone.

    Raises DraftError if it does not fit the target or is of an unknown variety, MissingTensorError if a part
    is absent.
    """
    kind = kind_of(files.config, files.names)
    assert kind is not None, "asked only of what was recognized"
    title, given = f"{files.place} ({_TITLES[kind]})", files.config
    config = layer_config(title, given.get("transformer_layer_config", given))
    width: int = config.hidden_size
    if kind == EAGLE3:
        width = _size(title, given, "target_hidden_size", width)
    if width != target.hidden_size:
        raise DraftError(
            f"{title} was made for a target of hidden size {width}, and {target.name} has "
            f"{target.hidden_size}: use a head that was made for {target.name}"
        )
    files.check_vocabulary("vocab_size", config.vocab_size, target)
    found = _by_short_names(title, files.names)
    taps = _taps(title, given, target.layers) if kind == EAGLE3 else ()
    tokens = _size(title, given, "draft_vocab_size", config.vocab_size)
    needed, optional = _shapes(kind, config, target, len(taps), tokens)
    unknown = sorted(found.keys() - needed.keys() - optional.keys() - _IGNORED)
    if unknown:
        raise DraftError(
            f"{title} has the tensor {found[unknown[0]][:60]!r}, which heads of one plain Llama layer lack: "
            "this variety is not supported"
        )
    expected = {**needed, **{name: shape for name, shape in optional.items() if name in found}}
    stored = {name: found.get(name, name) for name in expected}
    for name, shape in expected.items():
        files.expect(stored[name], *shape)
    check_layer(title, config)
    known = min(tokens, target.vocab_size) if tokens == config.vocab_size else tokens
    return EagleFormat(kind, config, stored, taps, known, kind == EAGLE3 and _norm_first(title, given))


def _by_short_names(title: str, names: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        first = found.setdefault(_short(name), name)
        if first != name:
            raise DraftError(
                f"{title} has a part twice, as {first[:60]!r} and {name[:60]!r}: name a file of one head"
            )
    return found


def _norm_first(title: str, given: Mapping[str, Any]) -> bool:
    """Return `norm_before_residual`; if `speculators` omits it, readers of the format disagree on the
    default.
    """
    value = given.get("norm_before_residual")
    if type(value) is not bool and (value is not None or "speculators_model_type" in given):
        raise DraftError(
            f"{title} lacks norm_before_residual (true or false) in its {CONFIG}: set it as the head was "
            "trained"
        )
    return bool(value)


def _size(title: str, given: Mapping[str, Any], name: str, default: int) -> int:
    """Return a size of the configuration, which may be absent or null."""
    value = given.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < LARGEST):
        raise DraftError(f"{title} has {name}: {repr(value)[:60]} in its {CONFIG}, which is no size")
    return value or default


def _taps(title: str, given: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are fused: those in the configuration, or the published default.

    The `speculators` format counts inputs, as here. `eagle_config`, of other trainers, counts outputs.
    """
    named, nested = given.get("eagle_aux_hidden_state_layer_ids"), given.get("eagle_config") or {}
    if named is None and isinstance(nested, dict):
        outputs = nested.get("eagle_aux_hidden_state_layer_ids")
        named = [layer + 1 for layer in outputs] if _are_layers(outputs) else outputs
    taps = [2, layers // 2, layers - 3] if named is None else named
    if not _are_layers(taps) or not all(0 <= tap <= layers for tap in taps) or len({*taps}) < len(taps):
        raise DraftError(
            f"{title} asks for the inputs of layers {repr(taps)[:60]}, which a target of {layers} layers "
            "does not have: use a head that was made for it"
        )
    return tuple(taps)


def _are_layers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


Shapes = dict[str, tuple[int, ...]]


def _shapes(kind: str, config: Any, target: TargetShape, taps: int, tokens: int) -> tuple[Shapes, Shapes]:
    """Return the required and the optional shapes, by short names."""
    width, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    query = config.num_attention_heads * config.head_dim
    pair = config.num_key_value_heads * config.head_dim
    given = width if kind == EAGLE else 2 * width
    fused = 2 * width if kind == EAGLE else taps * target.hidden_size
    products: Shapes = {
        "fc": (width, fused),
        "self_attn.q_proj": (query, given),
        "self_attn.k_proj": (pair, given),
        "self_attn.v_proj": (pair, given),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    needed = {f"{name}.weight": shape for name, shape in products.items()}
    needed["post_attention_layernorm.weight"] = (width,)
    optional: Shapes = {f"{name}.bias": shape[:1] for name, shape in products.items()}
    optional["embed_tokens.weight"] = (vocabulary, width)
    if kind == EAGLE3:
        needed |= dict.fromkeys(("input_layernorm.weight", "hidden_norm.weight", "norm.weight"), (width,))
        needed["lm_head.weight"] = (tokens, width)
        (needed if tokens != vocabulary else optional)["d2t"] = (tokens,)
        optional["input_norm.weight"] = (fused,)
        if width != target.hidden_size:  # if the target's embeddings have another width
            needed["embed_tokens.weight"] = optional.pop("embed_tokens.weight")
    return needed, optional


def token_map(files: HeadFiles, facts: EagleFormat, vocabulary: int) -> torch.Tensor:
    """Return the target's id [n] of each token of an EAGLE-3 head. Raises DraftError for an invalid id.

    The file holds the offset of each id.
    """
    count = facts.known
    tokens = torch.arange(count)
    if "d2t" in facts.stored:
        tokens = tokens + files.integers(facts.stored["d2t"])[:count]
    if not bool(((tokens >= 0) & (tokens < vocabulary)).all()) or len(tokens.unique()) < count:
        raise DraftError(
            f"{files.place} ({facts.title}) maps its {count} tokens beyond the target's {vocabulary}, or "
            "two to one (tensor 'd2t'): download it again, or use a head that was made for this target"
        )
    return tokens


# Absent values have LlamaConfig's default, as in the authors' code.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
LARGEST = 2**31  # of any size
_OTHERS = ("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters")


def layer_config(title: str, given: Any) -> Any:
    """Return a LlamaConfig whose sizes are valid and consistent. Takes no memory, whatever the sizes.

    title: title of the head, for messages. Raises DraftError.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    try:
        config: Any = LlamaConfig(**{name: given[name] for name in (*_SIZES, *_OTHERS) if name in given})
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise _unlike(title, one_line(error)) from error
    for name in _SIZES:
        size = getattr(config, name)
        if type(size) is not int or not 0 < size < LARGEST:
            raise _unlike(title, f"{name} is {repr(size)[:60]}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise _unlike(
            title, f"{config.num_attention_heads} heads do not share {config.num_key_value_heads} evenly"
        )
    if config.head_dim % 2:
        raise _unlike(title, f"head_dim is {config.head_dim}, which is odd")
    epsilon = config.rms_norm_eps
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise _unlike(title, f"rms_norm_eps is {repr(epsilon)[:60]}")
    return config


def check_layer(title: str, config: Any) -> None:
    """Check that transformers can make rotary positions and an activation from it.

    That allocates memory for each number of a head: call it once the tensors are known to have these sizes.
    Raises DraftError.
    """
    from transformers.activations import ACT2FN
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        rates = LlamaRotaryEmbedding(config).inv_freq
        ACT2FN[config.hidden_act]
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise _unlike(title, one_line(error)) from error
    if not math.isfinite(float(rates.sum())):
        raise _unlike(title, "its positions are no finite numbers")


def _unlike(title: str, why: str) -> DraftError:
    return DraftError(f"{title} does not have the configuration of a Llama layer: {why}")
