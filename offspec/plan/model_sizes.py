"""Sizes of a model: its bytes and arithmetic, from its headers, or from a config.json alone."""

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint import Checkpoint, local_path, open_checkpoint
from offspec.checkpoint.config_sizes import check_sizes
from offspec.checkpoint.folder import CONFIG, read_config
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.known_models import known_config
from offspec.checkpoint.open import DEMO, DEMO_WIDE
from offspec.checkpoint.pack_manifest import format_of
from offspec.checkpoint.quantized.common import uniform_formats
from offspec.checkpoint.quantized.methods import METHODS, name_of
from offspec.checkpoint.quantized.schemes import matches
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, dtype_name, nbytes_of
from offspec.checkpoint.wide_model import FACTOR
from offspec.checkpoint.wide_tensors import wide_config
from offspec.core.config import PackFormat
from offspec.core.errors import ModelNotFoundError, UnsupportedModelError
from offspec.core.files import temporary_folder
from offspec.model.experts import is_experts
from offspec.model.loaded import LoadedModel
from offspec.model.probe.build import build_skeleton
from offspec.model.quantize.pack.contents import is_router, refuse_packed
from offspec_kernels.dequant import Format
from offspec_kernels.errors import ArgumentError
from offspec_planners.cost import ModelSizes
from offspec_planners.expert_costs import ExpertSizes

_CHOSEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_top_k")  # in configurations
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_GROUP = 64  # quantized matrices have a multiple of this number of columns
_LEFT_OUT = ("modules_to_not_convert", "ignore", "exclude_modules")  # settings that list modules


def sizes_of(model: LoadedModel, name: str) -> ModelSizes:
    """Return the sizes of an opened model from which costs are computed."""
    config = model.skeleton.config
    head = model.skeleton.model.get_output_embeddings().weight
    weights = [_multiplied(layer, config) for layer in model.skeleton.layers]
    unpacked = sum(binder.unpacked_elements for binder in model.dense)
    unpacked_bytes = sum(binder.unpacked_bytes for binder in model.dense)
    return ModelSizes(
        name=name,
        layers=tuple(model.layer_bytes),
        weights=sum(weights) // len(weights),
        head=model.head_stored_bytes,
        head_weights=head.numel(),
        kv_per_token=model.cache_bytes(1),
        attention=2 * sum(model.skeleton.rows.products) // len(weights),
        hidden=config.hidden_size,
        vocabulary=model.skeleton.vocab_size,
        unpacked=unpacked / len(weights),
        unpacked_bytes=unpacked_bytes / len(weights),
        experts=expert_sizes(model),
    )


def expert_sizes(model: LoadedModel) -> ExpertSizes | None:
    """Return the routed experts of a model that can be loaded on demand, if all of its layers have the
    same.
    """
    modules = model.experts.modules
    if not modules:
        return None
    first = modules[0].module
    weights = sum(weight.numel() for weight in first.parameters() if weight.dim() == 3) // first.num_experts
    return ExpertSizes(
        count=first.num_experts,
        chosen=chosen_experts(model.skeleton.layers[modules[0].layer], model.skeleton.config),
        layers=tuple(sorted(model.experts.layers)),
        nbytes=modules[0].units[0].layout.nbytes,
        weights=weights,
        unpacked=weights if modules[0].is_packed else 0.0,
    )


def chosen_experts(layer: torch.nn.Module, config: Any) -> int:
    """Return the number of experts per row in a layer, by its router or else the configuration."""
    named = [getattr(module, "top_k", None) for module in layer.modules()]
    named += [getattr(config, name, None) for name in _CHOSEN]
    return next((found for found in named if isinstance(found, int)), 1)


def _multiplied(layer: torch.nn.Module, config: Any) -> int:
    """Return the weights of a layer that one row is multiplied with: all matrices, and its chosen experts
    only.
    """
    total, chosen = 0, chosen_experts(layer, config)
    stacks: list[Any] = [module for module in layer.modules() if is_experts(module)]
    routed = {id(weight): module.num_experts for module in stacks for weight in module.parameters()}
    listed = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or chosen
    for name, weight in layer.named_parameters():
        if weight.dim() >= 2:
            among = routed.get(id(weight), listed if ".experts." in f".{name}." else chosen)
            total += weight.numel() * chosen // among
    return total


def open_on_meta(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8_cache: bool = False,
    quantize: PackFormat | None = None,
) -> tuple[LoadedModel, str]:
    """Open a model for planning, on the meta device, and return it with its fingerprint; config.json is
    enough.

    Its weights cannot be loaded unless they are on this machine in that format.

    Args:
        model: A config.json, a folder with one, anything `open_checkpoint` opens without a network, or the
            hub id of a well-known model.
        dtype: Dtype of the computation.
        device: Device of the computation.
        int8_cache: Whether the KV cache is in int8. Default False.
        quantize: Format that its matrices are quantized to. None: as they are.

    Raises:
        CheckpointError: There is no readable configuration, or the model to quantize already is quantized.
    """
    config = _config_alone(model)
    if config is None:
        checkpoint = _opened(model)
        if quantize is not None:
            refuse_packed(checkpoint)
            config = dict(checkpoint.config)
    if config is not None:
        if quantize is not None and "quantization_config" in config:
            raise UnsupportedModelError(f"{model} is already quantized: leave out `quantize`")
        return _from_config(config, dtype, device, int8_cache, quantize)
    found = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device, int8_cache=int8_cache)
    return found, checkpoint.fingerprint


def _config_alone(model: str) -> dict[str, Any] | None:
    """Return the configuration of a model without weights: from a file, a folder, or a well-known hub id."""
    if model == DEMO_WIDE:  # no file needs to be written
        return wide_config(open_checkpoint(DEMO).config, FACTOR)
    path, _ = local_path(model)
    if path.is_file() and path.suffix == ".json":
        return read_json(path)
    if path.is_dir() and (path / CONFIG).is_file() and not any(path.glob("*.safetensors")):
        return read_config(path)
    return None if path.exists() else known_config(model)


def _opened(model: str) -> Checkpoint:
    """Open the headers of a model. Raises CheckpointError, with other possible inputs for a plan."""
    try:
        return open_checkpoint(model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"{error}; or give the path of its config.json, which is enough for a plan, or one of the models "
            "whose sizes come with offspec (`offspec plan list` names them)"
        ) from error


def _from_config(
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    int8_cache: bool,
    quantize: PackFormat | None,
) -> tuple[LoadedModel, str]:
    """Lay out the tensors of a checkpoint with this configuration, one after the other, without a file."""
    check_sizes(config, (), CONFIG)
    text = json.dumps(config, sort_keys=True) + (quantize or "")
    quantized = config.pop("quantization_config", None)
    formats = ConfigFormats(quantized, quantize)
    with temporary_folder() as folder:
        (folder / CONFIG).write_text(json.dumps(config), "utf-8")
        skeleton = build_skeleton(folder, dtype)
        tensors, offset = dict[str, Weight](), 0
        for name, tensor in skeleton.model.state_dict().items():
            file = folder / f"{skeleton.layer_of(name)}.safetensors"
            shape = tuple(tensor.shape)
            packing = formats.of(name, shape) if skeleton.layer_of(name) is not None else None
            if packing is not None:
                tensors[name] = _packed(name, shape, packing, file, offset)
            else:
                nbytes = tensor.numel() * dtype.itemsize
                tensors[name] = TensorInfo(name, _DTYPES[dtype], shape, file, offset, nbytes)
            offset += tensors[name].nbytes
        found = LoadedModel(folder, tensors, dtype, device, int8_cache=int8_cache)
        return found, hashlib.sha256(text.encode()).hexdigest()


def _packed(name: str, shape: tuple[int, ...], format_: Format, file: Path, offset: int) -> PackedInfo:
    """Lay out the parts of a weight one after the other, except for a table of values, which our files
    omit.
    """
    parts = list[tuple[str, TensorInfo]]()
    for part, stored in format_.parts(shape).items():
        if part == "table":
            continue
        kind = dtype_name(stored.dtype)
        nbytes = nbytes_of(kind, stored.shape)
        parts.append((part, TensorInfo(f"{name}.{part}", kind, stored.shape, file, offset, nbytes)))
        offset += nbytes
    return PackedInfo(name, shape, format_, tuple(parts))


class ConfigFormats:
    """Formats of the weights of decoder layers.

    Args:
        settings: The `quantization_config` of a config.json; None: there is none.
        quantize: Format that other matrices are quantized to. Default None: as they are.
    """

    def __init__(self, settings: Any, quantize: PackFormat | None = None) -> None:
        told: Mapping[str, Any] = settings if isinstance(settings, dict) and quantize is None else {}
        self._left_out = [
            str(pattern) for name in _LEFT_OUT for pattern in _listed(told.get(name)) if quantize is None
        ]
        method = METHODS.get(name_of(told))
        self._experts_alone = method is not None and method.experts_only
        self._usual: tuple[Format, ...] = ()
        if quantize is not None:
            self._usual = (format_of(quantize),)
        elif told:
            self._usual = method.default_formats(told) if method is not None else uniform_formats(told)

    def of(self, name: str, shape: tuple[int, ...]) -> Format | None:
        """Return the format of a layer's parameter, of about the right size; None if it has 16 bits."""
        if len(shape) < 2 or is_router(name) or self._is_left_out(name):
            return None
        if self._experts_alone:
            if len(shape) != 3 or ".experts." not in name:
                return None
        elif shape[-1] % _GROUP:
            return None
        return next((format for format in self._usual if _can_be(format, shape)), None)

    def _is_left_out(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(_fits(pattern, module) for pattern in self._left_out)


def _listed(patterns: Any) -> list[Any]:
    return patterns if isinstance(patterns, list) else []


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return matches(pattern, module)
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _can_be(format: Format, shape: tuple[int, ...]) -> bool:
    try:
        format.parts(shape)
    except ArgumentError:
        return False
    return True
