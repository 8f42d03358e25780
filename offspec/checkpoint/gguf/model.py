"""The transformers model for a GGUF file: its configuration, and a recipe for every tensor.

transformers reads the configuration (or `GgufArchitecture.configure` does) and names the tensors. This module
completes it, and refuses a file that would become a slightly different model.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from offspec.checkpoint.gguf.architecture import GgufArchitecture
from offspec.checkpoint.gguf.architectures import architecture_of
from offspec.checkpoint.gguf.dequantize import GgufRecipe, RowOrder, Step, order_of
from offspec.checkpoint.gguf.header import GgufHeader, GgufTensor, special_id
from offspec.checkpoint.gguf.stub import quiet, write_stub
from offspec.checkpoint.ranges import INSTEAD, damaged, one_line
from offspec.core.errors import MissingTensorError, OffspecError, UnsupportedModelError
from offspec.core.files import as_disk_full_error, temporary_folder

_SPECIAL_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_LAYER = re.compile(r"blk\.(\d{1,9})\.", re.ASCII)
_LAYER_OF_MODEL = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
# A tensor's name within its layer, and its possible names in a file: one of them, or several that together
# make it.
_IN_LAYER = tuple(
    (re.compile(pattern), names)
    for pattern, names in (
        (
            r"(mlp|feed_forward|block_sparse_moe)\.experts\.gate_up_proj",
            ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
        ),
        (r"(mlp|feed_forward|block_sparse_moe)\.experts\.down_proj", ("ffn_down_exps.weight",)),
        (r"mlp\.experts\.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias")),
        (r"mlp\.experts\.down_proj_bias", ("ffn_down_exps.bias",)),
        (r"block_sparse_moe\.router\.weight", ("ffn_gate_inp.weight",)),
        (r"feed_forward\.expert_bias", ("exp_probs_b.bias",)),
        (
            r"shared_mlp\.input_linear\.weight",
            ("ffn_gate.weight", "ffn_up.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
        ),
        (r"shared_mlp\.output_linear\.weight", ("ffn_down.weight", "ffn_down_shexp.weight")),
        (
            r"linear_attn\.in_proj_qkvz\.weight",
            ("attn_gate.weight", "attn_qkv.weight", "ssm_in.weight"),
        ),
        (r"(linear_attn|mamba|mixer)\.dt_bias", ("ssm_dt.bias",)),
        (r"(linear_attn|mamba|mixer)\.A_log", ("ssm_a",)),
        (r"(mamba|mixer)\.D", ("ssm_d",)),
    )
)
# Tensors of a multi-token prediction module, stored after the last layer, by their names in safetensors.
_MODULE = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}


def read_config(header: GgufHeader) -> Any:
    """Return the transformers configuration, dtype bfloat16. Raises UnsupportedModelError."""
    from transformers import AutoConfig

    architecture = architecture_of(header)
    _check_layers(header, architecture.arch)
    with temporary_folder() as folder:
        try:
            if architecture.configure is None:
                with as_disk_full_error(folder):
                    write_stub(header, folder / "outline.gguf", tokens=False)
            with quiet():
                if architecture.configure is not None:
                    config = architecture.configure(header, architecture)
                else:
                    config = AutoConfig.from_pretrained(folder, gguf_file="outline.gguf")
                config = architecture.complete(config, header)
            _complete(config, architecture, header)
        except OffspecError:
            raise
        except Exception as error:  # transformers raises many types for invalid values
            raise UnsupportedModelError(_unreadable(header, error)) from error
    return config


def _check_layers(header: GgufHeader, arch: str) -> None:
    """Raise unless the declared number of layers matches the tensors: a model of that size is built next."""
    stated = header.metadata.get(f"{arch}.block_count")
    found = {int(match[1]) for name in header.tensors if (match := _LAYER.match(name))}
    if type(stated) is not int or stated != len(found) or found != set(range(len(found))):
        damaged(header.path, f"it declares {str(stated)[:40]!r} layers and has tensors of {len(found)}")


def _unreadable(header: GgufHeader, error: BaseException) -> str:
    return (
        f"transformers cannot build a model from the configuration in {header.path} "
        f"({one_line(error)}): {INSTEAD}"
    )


def _complete(config: Any, architecture: GgufArchitecture, header: GgufHeader) -> None:
    """Set the values that transformers leaves at another model's defaults."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        config.vocab_size = embedding.shape[0]
    for key, attribute in architecture.keys.items():
        if (value := header.metadata.get(f"{architecture.arch}.{key}")) is not None:
            setattr(config, attribute, value)
    for name, attribute in _SPECIAL_IDS.items():
        setattr(config, attribute, special_id(header, name))
    if architecture.rope is not None:
        architecture.rope(config, architecture.arch, header)


def recipes(header: GgufHeader, config: Any) -> list[GgufRecipe]:
    """Return a recipe for each tensor of the state dict, without tied ones, and of a prediction module.

    Raises UnsupportedModelError for a tensor of the file that is unknown to the model or has another shape,
    and MissingTensorError for a tensor that the file lacks.
    """
    architecture = architecture_of(header)
    shapes, names = _model_names(header, config, architecture)
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    sources: dict[str, list[GgufTensor]] = {}
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.name):  # gate before up
        if tensor.name in architecture.rope_tables:
            continue
        name = names.get(tensor.name, "")
        if name not in shapes:
            raise UnsupportedModelError(
                f"{header.path} has the tensor {tensor.name[:100]!r}, which transformers' "
                f"{architecture.arch} model does not have: {INSTEAD}"
            )
        sources.setdefault(name, []).append(tensor)
    if missing := [name for name in shapes if name not in sources]:
        raise MissingTensorError(f"{header.path} lacks the tensor {missing[0]}; download it again")
    return [
        _recipe(header, config, architecture, name, shape, sources[name]) for name, shape in shapes.items()
    ]


def _model_names(
    header: GgufHeader, config: Any, architecture: GgufArchitecture
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes of the state dict, and its name for each possible tensor name of a file."""
    import gguf

    from offspec.checkpoint.meta_model import meta_model

    try:
        model = meta_model(config)
    except Exception as error:  # transformers raises many types for an invalid configuration
        raise UnsupportedModelError(_unreadable(header, error)) from error
    config.architectures = [type(model).__name__]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.arch)
    known = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names = {found: name for name in shapes for found in _file_names(name, known)}
    if architecture.extra_layers(header):
        more, of_module = _module_names(names, shapes, config.num_hidden_layers, config.hidden_size)
        names |= more
        shapes |= of_module
    return shapes, names


def _file_names(name: str, known: Any) -> list[str]:
    """Return the possible names in a file for a tensor of the state dict; none if unknown.

    known: the gguf package's table for the architecture.
    """
    if in_layer := _LAYER_OF_MODEL.fullmatch(name):
        for pattern, names in _IN_LAYER:
            if pattern.fullmatch(in_layer[2]):
                return [f"blk.{in_layer[1]}.{each}" for each in names]
    for spelling in (name, re.sub(r"^model\.", "backbone.", name)):
        if found := known.get_name(spelling, try_suffixes=(".weight", ".bias")):
            return [found] if found.endswith((".weight", ".bias")) else [f"{found}.weight", found]
    return []


def _module_names(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], layers: int, size: int
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return names and shapes of a multi-token prediction module, like `names` and `shapes` for the model.

    Its layer has the shapes of an attention layer. layers: number of the model's layers; size: hidden size.
    """
    attends = re.compile(r"blk\.(\d+)\.attn_k\.weight")
    like = next((match[1] for name in names if (match := attends.fullmatch(name))), None)
    of_file = {f"blk.{layers}.{theirs}": ours for theirs, ours in _MODULE.items()}
    found: dict[str, tuple[int, ...]] = dict.fromkeys(_MODULE.values(), (size,))
    found["mtp.fc.weight"] = (size, 2 * size)
    for theirs, ours in names.items():
        if like is not None and theirs.startswith(f"blk.{like}."):
            name = "mtp.layers.0." + ours.removeprefix(f"model.layers.{like}.")
            of_file[f"blk.{layers}." + theirs.removeprefix(f"blk.{like}.")] = name
            found[name] = shapes[ours]
    return of_file, found


def _recipe(
    header: GgufHeader,
    config: Any,
    architecture: GgufArchitecture,
    name: str,
    shape: tuple[int, ...],
    sources: list[GgufTensor],
) -> GgufRecipe:
    first = sources[0]
    step: Step = "as it is"
    heads = 1
    order = order_of(
        config, name, sources, tiled=architecture.tiled_heads, transposed=architecture.transposed_experts
    )
    if architecture.permuted and (".attn_q." in first.name or ".attn_k." in first.name):
        step = "unpermute"
        heads = config.num_attention_heads if ".attn_q." in first.name else config.num_key_value_heads
    elif (
        architecture.norms_plus_one and first.name.endswith("norm.weight") and ".ssm_norm." not in first.name
    ):
        step = "minus one"
    elif first.name.endswith(".ssm_a"):
        step = "log of minus"
    elif name.endswith(".experts.gate_up_proj_bias") and len(sources) == 2:
        step = "alternate"
    if not _fits(shape, sources, order, step) or (step == "unpermute" and shape[0] % (2 * heads)):
        damaged(
            header.path,
            f"tensor {first.name!r} is {list(first.shape)}, but the model expects {list(shape)}",
        )
    return GgufRecipe(name, shape, tuple(sources), step, heads, order)


def _fits(shape: tuple[int, ...], sources: list[GgufTensor], order: RowOrder, step: Step) -> bool:
    """Return whether the sources provide exactly the values of a weight of this shape, in this order."""
    if math.prod(shape) == 0 or sum(source.values for source in sources) != math.prod(shape):
        return False
    if order.stack is not None and len(shape) == 3:
        rows, columns = reversed(shape[1:]) if order.stack.transposed else shape[1:]
        return all(
            len(source.shape) == 3 and (source.shape[0], source.shape[2]) == (shape[0], columns)
            for source in sources
        ) and rows == sum(source.shape[1] for source in sources)
    if step == "alternate":
        return all(source.shape == (shape[0], shape[1] // 2) for source in sources)
    if len(sources) > 1:  # all their rows, each as long as the weight's
        rows = [math.prod(source.shape[:-1]) for source in sources]
        taken = [sum(run.rows for run in order.runs if run.source == i) for i in range(len(sources))]
        return taken == rows and all(source.shape[-1] == shape[-1] for source in sources)
    (source,) = sources
    if source.name.endswith(".ssm_norm.weight"):  # one row per group
        return True
    # llama.cpp drops some dimensions of 1 and adds others
    return tuple(size for size in source.shape if size > 1) == tuple(size for size in shape if size > 1)
