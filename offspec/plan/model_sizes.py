"""The outline of a model: its bytes and arithmetic, from its headers, or from a config.json alone."""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from offspec.checkpoint import local_path, open_checkpoint
from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.shapes import known_config
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight, bytes_of
from offspec.model.loaded import LoadedModel
from offspec.model.probe.build import build_skeleton
from offspec_kernels.dequant.grouped import BITS, GROUP, Grouped
from offspec_planners.cost import ModelSizes

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def sizes_of(model: LoadedModel, name: str) -> ModelSizes:
    """The sizes of an opened model that costs are computed from."""
    config = model.skeleton.config
    head = model.skeleton.model.get_output_embeddings().weight
    weights = [_multiplied(layer, config) for layer in model.skeleton.layers]
    unpacked, unpacked_bytes = model.unpacked
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
    )


def _multiplied(layer: torch.nn.Module, config: Any) -> int:
    """Weights of a layer that one row meets: all of its matrices, and of its experts those it is sent to."""
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    total = 0.0
    for name, weight in layer.named_parameters():
        if weight.dim() >= 2:
            total += weight.numel() * (chosen / experts if ".experts." in f".{name}." else 1.0)
    return int(total)


def imagine(
    model: str, dtype: torch.dtype, device: torch.device, *, int8_cache: bool = False
) -> tuple[LoadedModel, str]:
    """A model to plan for, and its fingerprint: config.json is enough.

    Nothing can be loaded from what is returned unless its weights are on this machine.

    Args:
        model: A config.json, a folder with one, anything `open_checkpoint` opens without a network, or the
            hub id of a well-known model.
        dtype: Of values that are computed with.
        device: Where they are computed.
        int8_cache: Whether keys and values are kept in 8 bits. Default False.

    Raises:
        CheckpointError: The configuration cannot be read.
    """
    path, _ = local_path(model)
    if path.is_file() and path.suffix == ".json":
        return _from_config(read_json(path), dtype, device, int8_cache)
    if path.is_dir() and (path / CONFIG).is_file() and not any(path.glob("*.safetensors")):
        return _from_config(read_json(path / CONFIG), dtype, device, int8_cache)
    known = None if path.exists() else known_config(model)
    if known is not None:
        return _from_config(known, dtype, device, int8_cache)
    checkpoint = open_checkpoint(model)
    found = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device, int8_cache=int8_cache)
    return found, checkpoint.fingerprint


def _from_config(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, int8_cache: bool
) -> tuple[LoadedModel, str]:
    """Tensors as a checkpoint of this configuration would hold them, one behind the other in no file."""
    text = json.dumps(config, sort_keys=True)
    packing = _packing(config.pop("quantization_config", None))
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / CONFIG).write_text(json.dumps(config), "utf-8")
        skeleton = build_skeleton(folder, dtype)
        tensors, offset = dict[str, Weight](), 0
        for name, tensor in skeleton.model.state_dict().items():
            file = folder / f"{skeleton.layer_of(name)}.safetensors"
            shape = tuple(tensor.shape)
            is_matrix = skeleton.layer_of(name) is not None and len(shape) >= 2
            if packing is not None and is_matrix and shape[-1] % GROUP == 0:
                tensors[name] = _packed(name, shape, packing, file, offset)
            else:
                nbytes = tensor.numel() * dtype.itemsize
                tensors[name] = TensorInfo(name, _DTYPES[dtype], shape, file, offset, nbytes)
            offset += tensors[name].nbytes
        found = LoadedModel(folder, tensors, dtype, device, int8_cache=int8_cache)
        return found, hashlib.sha256(text.encode()).hexdigest()


def _packing(quantised: Any) -> Grouped | None:
    """A format of about the size of the one that a configuration names; None for 16 bits."""
    if not isinstance(quantised, dict):
        return None
    bits = quantised.get("bits")
    if quantised.get("load_in_4bit"):
        bits = 4
    for group in dict(quantised.get("config_groups") or {}).values():
        bits = (group.get("weights") or {}).get("num_bits", bits)
    return Grouped(bits if bits in BITS else 8)


_NAMES = {torch.uint8: "U8", torch.float16: "F16"}


def _packed(name: str, shape: tuple[int, ...], format_: Grouped, file: Path, offset: int) -> PackedInfo:
    """Its parts one behind the other."""
    parts = list[tuple[str, TensorInfo]]()
    for part, stored in format_.parts(shape).items():
        kind = _NAMES[stored.dtype]
        nbytes = bytes_of(kind, stored.shape)
        parts.append((part, TensorInfo(f"{name}.{part}", kind, stored.shape, file, offset, nbytes)))
        offset += nbytes
    return PackedInfo(name, shape, format_, tuple(parts))
