"""A GGUF file's architecture as transformers knows it: its configuration, and a recipe for every tensor.

transformers reads the configuration (of hybrids, `hybrids` does) and names the tensors; this module adds what
that leaves out, and refuses a file rather than unpack it to a model that is not quite the same.
"""

from __future__ import annotations

import math
import re
from typing import Any

from offspec.checkpoint.gguf.header import GgufHeader, GgufTensor, special_id
from offspec.checkpoint.gguf.hybrids import GATED_DELTA, HYBRIDS, WITHOUT_ROPE, extra_layers, hybrid_config
from offspec.checkpoint.gguf.ministral import as_ministral
from offspec.checkpoint.gguf.mixtral import as_mixtral
from offspec.checkpoint.gguf.names import file_names, module_names
from offspec.checkpoint.gguf.order import Order, order_of
from offspec.checkpoint.gguf.rope import rope_tables, set_rope
from offspec.checkpoint.gguf.stub import quiet, write_outline
from offspec.checkpoint.gguf.values import GgufRecipe, Step
from offspec.checkpoint.ranges import INSTEAD, damaged, one_line
from offspec.core.errors import MissingTensorError, OffspecError, UnsupportedModelError
from offspec.core.files import disk_full, scratch_folder

# Architectures, by llama.cpp's names, whose unpacking the tests compare with the model it came from.
# Mistral's are "llama" up to its third series, and "mistral3" from there on.
ARCHITECTURES = (
    *("gemma2", "gemma3", "gpt-oss", "llama", "mistral3", "phi3"),
    *("qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2"),
    *HYBRIDS,
)
_PERMUTED = ("llama", "mistral3", "granitehybrid", "nemotron_h")
_GEMMAS = ("gemma2", "gemma3")
_NORMS_PLUS_ONE = (*_GEMMAS, *GATED_DELTA)
# Keys of the file that transformers leaves at their defaults, and the attributes they belong in.
_EXTRA = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "gpt-oss": {
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_feed_forward_length": "intermediate_size",
    },
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "starcoder2": {"rope.freq_base": "rope_theta"},
}
# Attributes that a Llama's file states only by having tensors.
_BIASES = {"blk.0.attn_output.bias": "attention_bias", "blk.0.ffn_up.bias": "mlp_bias"}
_SPECIAL_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_LAYER = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)
# The two Gemmas (by number of layers) that scale scores by the width per head and not by the head's size.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}


def architecture(header: GgufHeader) -> str:
    """The file's architecture. Raises UnsupportedModelError for one not in ARCHITECTURES."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        damaged(header.path, "it does not name an architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} holds a {name[:40]!r} model, and GGUF files can be read for "
            f"{', '.join(ARCHITECTURES)}: {INSTEAD}"
        )
    return name


def read_config(header: GgufHeader) -> Any:
    """The transformers configuration, dtype bfloat16. Raises UnsupportedModelError."""
    from transformers import AutoConfig

    arch = architecture(header)
    _check_layers(header, arch)
    with scratch_folder() as folder:
        try:
            if arch in HYBRIDS:
                with quiet():
                    config = hybrid_config(header, arch)
            else:
                with disk_full(folder):
                    write_outline(header, folder / "outline.gguf", tokens=False)
                with quiet():
                    config = AutoConfig.from_pretrained(folder, gguf_file="outline.gguf")
                    config = as_mixtral(as_ministral(config, header), header)
            _complete(config, arch, header)
        except OffspecError:
            raise
        except Exception as error:  # whatever transformers made of these values
            raise UnsupportedModelError(_unreadable(header, error)) from error
    return config


def _check_layers(header: GgufHeader, arch: str) -> None:
    """Refuse a number of layers that the tensors do not bear out: a model of it is about to be built."""
    stated = header.metadata.get(f"{arch}.block_count")
    found = {int(match[1]) for name in header.tensors if (match := _LAYER.match(name))}
    if type(stated) is not int or stated != len(found) or found != set(range(len(found))):
        damaged(header.path, f"it states {str(stated)[:40]!r} layers and has tensors of {len(found)}")


def _unreadable(header: GgufHeader, error: BaseException) -> str:
    return (
        f"the configuration in {header.path} makes no model that transformers knows "
        f"({one_line(error)}): {INSTEAD}"
    )


def _complete(config: Any, arch: str, header: GgufHeader) -> None:
    """Set what transformers leaves at a default that would be another model's."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        config.vocab_size = embedding.shape[0]
    for key, attribute in _EXTRA.get(arch, {}).items():
        if (value := header.metadata.get(f"{arch}.{key}")) is not None:
            setattr(config, attribute, value)
    if config.model_type == "llama":
        for name, attribute in _BIASES.items():
            setattr(config, attribute, name in header.tensors)
    for name, attribute in _SPECIAL_IDS.items():
        setattr(config, attribute, special_id(header, name))
    if arch in _GEMMAS:
        by_width = (arch, config.num_hidden_layers) in _SCALED_BY_WIDTH
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if by_width else config.head_dim
    if arch == "gpt-oss":
        config.rope_parameters = {"rope_type": "default"}  # by default that of gpt-oss-20b
    if arch not in WITHOUT_ROPE:
        set_rope(config, arch, header)


def recipes(header: GgufHeader, config: Any) -> list[GgufRecipe]:
    """How to make each tensor of the model's state dict (less tied ones), and of a prediction module.

    Raises UnsupportedModelError for a tensor of the file that the model has no place for, or of another
    shape; MissingTensorError for one that the file lacks.
    """
    arch = architecture(header)
    shapes, names = _model_names(header, config, arch)
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    sources: dict[str, list[GgufTensor]] = {}
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.name):  # gate before up
        if tensor.name in rope_tables(arch):
            continue
        name = names.get(tensor.name, "")
        if name not in shapes:
            raise UnsupportedModelError(
                f"{header.path} has the tensor {tensor.name[:100]!r}, for which transformers' {arch} model "
                f"has no place: {INSTEAD}"
            )
        sources.setdefault(name, []).append(tensor)
    if missing := [name for name in shapes if name not in sources]:
        raise MissingTensorError(f"{header.path} has nothing for the tensor {missing[0]}; download it again")
    return [_recipe(header, config, arch, name, shape, sources[name]) for name, shape in shapes.items()]


def _model_names(
    header: GgufHeader, config: Any, arch: str
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of the model's state dict, and its name for each tensor name that a file could have."""
    import gguf

    from offspec.checkpoint.meta_model import meta_model

    try:
        model = meta_model(config)
    except Exception as error:  # whatever transformers made of this configuration
        raise UnsupportedModelError(_unreadable(header, error)) from error
    config.architectures = [type(model).__name__]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names = {found: name for name in shapes for found in file_names(name, known)}
    if extra_layers(header, arch):
        more, of_module = module_names(names, shapes, config.num_hidden_layers, config.hidden_size)
        names |= more
        shapes |= of_module
    return shapes, names


def _recipe(
    header: GgufHeader, config: Any, arch: str, name: str, shape: tuple[int, ...], sources: list[GgufTensor]
) -> GgufRecipe:
    first = sources[0]
    step: Step = "as it is"
    heads = 1
    order = order_of(config, arch, name, sources)
    if arch in _PERMUTED and (".attn_q." in first.name or ".attn_k." in first.name):
        step = "unpermute"
        heads = config.num_attention_heads if ".attn_q." in first.name else config.num_key_value_heads
    elif arch in _NORMS_PLUS_ONE and first.name.endswith("norm.weight") and ".ssm_norm." not in first.name:
        step = "minus one"
    elif first.name.endswith(".ssm_a"):
        step = "log of minus"
    elif name.endswith(".experts.gate_up_proj_bias") and len(sources) == 2:
        step = "alternate"
    if not _fits(shape, sources, order, step) or (step == "unpermute" and shape[0] % (2 * heads)):
        damaged(
            header.path,
            f"tensor {first.name!r} is {list(first.shape)}, and the model has {list(shape)} there",
        )
    return GgufRecipe(name, shape, tuple(sources), step, heads, order)


def _fits(shape: tuple[int, ...], sources: list[GgufTensor], order: Order, step: Step) -> bool:
    """Whether the sources have all that a weight of this shape is made of, in this order."""
    if math.prod(shape) == 0 or sum(source.values for source in sources) != math.prod(shape):
        return False
    if order.stack is not None and len(shape) == 3:
        rows, columns = reversed(shape[1:]) if order.stack.turned else shape[1:]
        return all(
            len(source.shape) == 3 and (source.shape[0], source.shape[2]) == (shape[0], columns)
            for source in sources
        ) and rows == sum(source.shape[1] for source in sources)
    if step == "alternate":
        return all(source.shape == (shape[0], shape[1] // 2) for source in sources)
    if len(sources) > 1:  # all their rows, and each as long as the weight's
        rows = [math.prod(source.shape[:-1]) for source in sources]
        taken = [sum(run.rows for run in order.runs if run.source == i) for i in range(len(sources))]
        return taken == rows and all(source.shape[-1] == shape[-1] for source in sources)
    (source,) = sources
    if source.name.endswith(".ssm_norm.weight"):  # a row for each group
        return True
    # llama.cpp drops dimensions of 1, and adds some
    return tuple(size for size in source.shape if size > 1) == tuple(size for size in shape if size > 1)
