"""Weights of a plain decoder, fused and arranged for the few rows of a draft step.

Letters: T rows, H hidden size, Q query heads, KV key heads, D head size, I inner size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offspec.core.memory import malloc_trim
from offspec.model.fused.linear import (
    DequantizingLinear,
    LinearFunction,
    make_linear,
    select_quantized_linear,
)
from offspec.model.fused.shape import DecoderShape, decoder_shape
from offspec.model.quantize.quantized_layers import QuantizedLayers, quantized_layer_bytes, unpacked_values
from offspec.model.quantize.quantized_matrix import QuantizedMatrix
from offspec.model.skeleton import Skeleton
from offspec.model.unpacking import Scratch

Weights = Mapping[str, torch.Tensor | QuantizedMatrix]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Fused weights of one layer. Norms are in the form of `norm_gain`.

    Args:
        input_norm: Norm before attention.
        qkv: Product [(Q + 2 KV) D, H], three matrices in most families.
        q_norm: Norm of query heads, or None.
        k_norm: Norm of key heads, or None.
        out: Output product of attention.
        post_attention_norm: Norm after attention, or None.
        mlp_norm: Norm before the MLP.
        gate_up: Product [2 I, H], two matrices in most families.
        down: Output product of the MLP.
        post_mlp_norm: Norm after the MLP, or None.
    """

    input_norm: torch.Tensor
    qkv: LinearFunction
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: LinearFunction
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: LinearFunction
    down: LinearFunction
    post_mlp_norm: torch.Tensor | None


def layer_weights(skeleton: Skeleton, index: int, packed: QuantizedLayers | None) -> Weights:
    """Return a layer's weights by their names within it; missing ones are on the meta device."""
    bound = dict(skeleton.layers[index].named_parameters())
    return bound if packed is None else {**bound, **packed.packed(index)}


def fuse_layers(
    skeleton: Skeleton,
    shape: DecoderShape,
    release: Callable[[int], None],
    packed: QuantizedLayers | None = None,
) -> list[FusedLayer]:
    """Fuse the weights of all layers, one layer at a time, so that at most one is in memory twice.

    Args:
        skeleton: Skeleton with bound weights.
        shape: Shape of the model.
        release: Called with the index of each layer whose weights can be freed.
        packed: Quantized weights, which are not bound.
    """
    fused = []
    for index in range(len(skeleton.layers)):
        weights = layer_weights(skeleton, index, packed)
        fused.append(_fuse(weights, shape, None if packed is None else packed.room))
        del weights
        release(index)
        malloc_trim()  # the freed originals would otherwise stay on the heap
    return fused


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Size of quantized layers: bytes, and number of workspace values for unpacking them."""

    nbytes: int
    scratch: int


def packed_size(skeleton: Skeleton, bits: int, device: torch.device) -> PackedSize:
    """Return the size of all layers quantized to `bits`, in the form used on a device.

    Args:
        skeleton: Skeleton with or without weights.
        bits: Bits of the quantized matrices.
        device: Device of the weights; it need not exist on this machine.
    """
    shape, layers = decoder_shape(skeleton), list(skeleton.layers)
    total, unpacks = sum(quantized_layer_bytes(layer, bits) for layer in layers), shape is None
    if shape is not None:
        dtype: torch.dtype = skeleton.model.dtype
        for layer in layers:
            for names in shape.family.products:
                matrices = [layer.get_parameter(f"{name}.weight").shape for name in names]
                unpacks |= select_quantized_linear(matrices, bits, device, dtype) is DequantizingLinear
    return PackedSize(total, max(map(unpacked_values, layers)) if unpacks else 0)


def norm_gain(weight: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """Return a norm's factors times sqrt(H), float32 [H], for x divided by its length instead of its RMS."""
    return (weight.detach().float() + shape.family.from_one) * math.sqrt(len(weight))


def _fuse(given: Weights, shape: DecoderShape, room: Callable[[], Scratch] | None) -> FusedLayer:
    def vector(name: str) -> torch.Tensor | None:
        # Copied: a view would keep the memory of the whole layer.
        found = given.get(name)
        return found.detach().clone() if isinstance(found, torch.Tensor) else None

    def norm(name: str) -> torch.Tensor | None:
        weight = vector(f"{name}.weight")
        return None if weight is None else norm_gain(weight, shape)

    def head_norm(name: str) -> torch.Tensor | None:
        weight = vector(f"self_attn.{name}_norm.weight")
        return weight if weight is None else weight.add_(int(shape.family.from_one))

    def product(*names: str) -> LinearFunction:
        weights = [given[f"{name}.weight"] for name in names]
        return make_linear(
            [w.detach() if isinstance(w, torch.Tensor) else w for w in weights],
            _joined([vector(f"{name}.bias") for name in names], [w.shape[0] for w in weights]),
            room,
        )

    before, after, between, last = map(norm, shape.family.norms)
    assert before is not None and between is not None
    qkv, out, gate_up, down = (product(*names) for names in shape.family.products)
    return FusedLayer(
        input_norm=before,
        qkv=qkv,
        q_norm=head_norm("q"),
        k_norm=head_norm("k"),
        out=out,
        post_attention_norm=after,
        mlp_norm=between,
        gate_up=gate_up,
        down=down,
        post_mlp_norm=last,
    )


def _joined(biases: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor | None:
    """Concatenate biases of these sizes, with zeros for missing ones; return None if all are missing."""
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    whole = [some.new_zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
    return torch.cat(whole)
