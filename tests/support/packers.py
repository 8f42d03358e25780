"""Quantized checkpoints as others publish them, with the values of their weights.

Codes, scales and zero points are random, the values follow from the definition of each method, and packing
comes last: nothing is unpacked here. compressed-tensors is packed by its own library.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_AWQ_ORDER = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # position of each of eight outputs in a word, the lowest half byte first


class PackedWeight(NamedTuple):
    """tensors: by name, without the module's name and dot; values: the weight, float32 [out, in]."""

    tensors: dict[str, Tensor]
    values: Tensor


class RandomCodes(NamedTuple):
    """codes [in, out]; zeros and scales [groups, out]; group_of [in]: the group of each input."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: Tensor

    def values(self) -> Tensor:
        """Compute in the scales' dtype; float32 [out, in]."""
        dtype = self.scales.dtype
        steps = (self.codes - self.zeros[self.group_of]).to(dtype)
        return (steps * self.scales[self.group_of]).float().T.contiguous()


def draw(
    shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype, shuffled: bool = False
) -> RandomCodes:
    outputs, inputs = shape
    group = inputs if group == -1 else group
    index = torch.arange(inputs) // group
    if shuffled:
        index = index[torch.randperm(inputs)]
    groups, most = inputs // group, 2**bits
    return RandomCodes(
        torch.randint(0, most, (inputs, outputs)),
        torch.randint(1, most, (groups, outputs)),
        (torch.rand(groups, outputs) + 0.5).div(2 * most).to(dtype),
        index,
    )


def awq(shape: tuple[int, int], group: int = 128, dtype: torch.dtype = torch.float16) -> PackedWeight:
    drawn = draw(shape, 4, group, dtype)
    codes, zeros = (
        part.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1) for part in (drawn.codes, drawn.zeros)
    )
    tensors = {
        "qweight": _pack_columns(codes, 4),
        "qzeros": _pack_columns(zeros, 4),
        "scales": drawn.scales,
    }
    return PackedWeight(tensors, drawn.values())


def gptq(
    shape: tuple[int, int],
    bits: int = 4,
    group: int = 128,
    *,
    desc_act: bool = False,
    less_one: bool = True,
    dtype: torch.dtype = torch.float16,
) -> PackedWeight:
    drawn = draw(shape, bits, group, dtype, shuffled=desc_act)
    tensors = {
        "qweight": _pack_columns(drawn.codes.T, bits).T.contiguous(),
        "qzeros": _pack_columns(drawn.zeros - int(less_one), bits),
        "scales": drawn.scales,
        "g_idx": drawn.group_of.int(),
    }
    return PackedWeight(tensors, drawn.values())


def _pack_columns(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, columns] to int32 [rows, columns · bits / 32]: one stream of bits, the lowest first."""
    stream = (codes[:, :, None] >> torch.arange(bits)) & 1
    words = stream.reshape(len(codes), -1, 32) << torch.arange(32)
    return words.sum(-1).to(torch.int32)  # the highest bit becomes the sign


def fp8(
    shape: tuple[int, int], block: tuple[int, int] | None, dtype: torch.dtype = torch.float32
) -> PackedWeight:
    rows, columns = block or shape
    codes = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-shape[0] // rows), -(-shape[1] // columns)) + 0.5).div(500).to(dtype)
    spread = scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    values = codes.float() * spread[: shape[0], : shape[1]]
    return PackedWeight(
        {"weight": codes, "weight_scale_inv": scales if block else scales.reshape(())}, values
    )


def mxfp4(shape: tuple[int, int, int]) -> PackedWeight:
    """tensors: blocks and scales; values [experts, columns, rows], as in gpt-oss."""
    experts, columns, rows = shape
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.randint(0, 16, (experts, rows, columns // 32, 32))
    exponents = torch.randint(117, 121, codes.shape[:3])
    signed = values[codes & 7] * (1 - 2 * (codes >> 3))
    made = (signed * 2.0 ** (exponents[..., None] - 127)).flatten(2).mT
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return PackedWeight({"blocks": blocks.byte(), "scales": exponents.byte()}, made.contiguous())


def nvfp4(shape: tuple[int, int], divided: bool = False) -> PackedWeight:
    """Pack as Model Optimizer does; divided: as compressed-tensors does, with values in bfloat16."""
    rows, columns = shape
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.randint(0, 16, (rows, columns // 16, 16))
    scales = (torch.rand(rows, columns // 16) * 400 + 20).to(torch.float8_e4m3fn)
    whole = torch.tensor([11357.7]) if divided else torch.tensor(1 / 11357.7)
    sizes = scales.float() / whole if divided else scales.float() * whole
    made = (values[codes & 7] * (1 - 2 * (codes >> 3)) * sizes[..., None]).flatten(1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1).byte()
    if divided:
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
        return PackedWeight(tensors | {"input_global_scale": torch.ones(1)}, made.bfloat16().float())
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    return PackedWeight(tensors | {"input_scale": torch.ones(())}, made)


def compressed(shape: tuple[int, int], format: str, dtype: torch.dtype, **weights: Any) -> PackedWeight:
    """Pack with compressed-tensors' own compressor. weights: its QuantizationArgs."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = (torch.randn(shape) * 0.3 + 0.1).to(dtype)
    low, high = _extremes(weight, args)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    compressor: Any = BaseCompressor.get_value_from_registry(format)
    tensors = compressor.compress(state, scheme)
    values = compressor.decompress(tensors, scheme)["weight"]
    return PackedWeight({name: tensor.contiguous() for name, tensor in tensors.items()}, values.float())


def _extremes(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().view(1), weight.max().view(1)
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.view(rows // height, height, columns // width, width)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.view(rows, -1, args.group_size if args.strategy == "group" else columns)
    return groups.amin(2), groups.amax(2)


def write(folder: Path, settings: Mapping[str, Any], modules: Mapping[str, PackedWeight]) -> Path:
    """Write a checkpoint of only these modules."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{part}": tensor for name, module in modules.items() for part, tensor in module[0].items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


def requantize(
    dense: Path,
    packed: Path,
    settings: Mapping[str, Any],
    pack: Callable[[tuple[int, int]], PackedWeight],
    which: str = ".layers.",
) -> None:
    """Write a model with packed weights, and replace the values of the dense model to match.

    dense: folder of a model; matrices with `which` in their names are replaced. packed: folder for the packed
    copy.
    """
    values, packed_tensors = load_file(dense / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in values.items():
        if which not in name or tensor.dim() != 2:
            packed_tensors[name] = tensor
            continue
        made = pack((tensor.shape[0], tensor.shape[1]))
        values[name] = made.values
        module = name.removesuffix(".weight")
        packed_tensors |= {f"{module}.{part}": stored for part, stored in made.tensors.items()}
    save_both(dense, packed, settings, values, packed_tensors)


def save_both(
    dense: Path,
    packed: Path,
    settings: Mapping[str, Any],
    values: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
) -> None:
    """Write the packed model, and give the dense model the same values.

    Args:
        dense: Folder of a model, whose weights are replaced.
        packed: Folder to make.
        settings: `quantization_config` of the packed model.
        values: Tensors of the dense model, by name.
        stored: Tensors of the packed model, by name.
    """
    packed.mkdir()
    for file in dense.iterdir():
        if file.suffix != ".safetensors":
            (packed / file.name).write_bytes(file.read_bytes())
    config = json.loads((dense / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
