"""Weights of a plain decoder, fused and laid out for the few rows of a draft step.

Letters: T rows, H hidden size, Q query heads, KV key heads, D head size, I inner size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from offspec.core.memory import trim
from offspec.model.fused.products import Product, UnpackingProduct, product_of, rounded_kind
from offspec.model.fused.shape import PlainShape, plain_shape
from offspec.model.quantize.resident_layers import RoundedLayers, rounded_bytes, unpacked_values
from offspec.model.quantize.rounding import RoundedMatrix
from offspec.model.skeleton import Skeleton
from offspec.model.unpacking import Scratch

Weights = Mapping[str, torch.Tensor | RoundedMatrix]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer. qkv [(Q + 2 KV) D, H] and gate_up [2 I, H] are what most families hold as five matrices.

    before and between: the norms before attention and before the gate; after and last: those behind attention
    and behind the gated product, where there are such. As `norm_gain` has them.
    """

    before: torch.Tensor
    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Product
    after: torch.Tensor | None
    between: torch.Tensor
    gate_up: Product
    down: Product
    last: torch.Tensor | None


def layer_weights(skeleton: Skeleton, index: int, packed: RoundedLayers | None) -> Weights:
    """The weights of a layer by their names inside it: on meta where there are none."""
    bound = dict(skeleton.layers[index].named_parameters())
    return bound if packed is None else {**bound, **packed.packed(index)}


def fuse_layers(
    skeleton: Skeleton, shape: PlainShape, release: Callable[[int], None], packed: RoundedLayers | None = None
) -> list[FusedLayer]:
    """Every layer's weights in their new form, layer by layer, so that one at most is held twice.

    Args:
        skeleton: With its weights bound.
        shape: What it is.
        release: Called with the index of each layer whose weights can go.
        packed: What is not bound, being rounded.
    """
    fused = []
    for index in range(len(skeleton.layers)):
        weights = layer_weights(skeleton, index, packed)
        fused.append(_fuse(weights, shape, None if packed is None else packed.room))
        del weights
        release(index)
        trim()  # the freed originals would otherwise stay on the heap
    return fused


@dataclass(frozen=True, slots=True)
class PackedSize:
    """What layers take once they are rounded: bytes, and values of scratch to unpack them in."""

    nbytes: int
    scratch: int


def packed_size(skeleton: Skeleton, bits: int, device: torch.device) -> PackedSize:
    """Of all layers, in the form in which they will be used.

    Args:
        skeleton: With or without weights.
        bits: That matrices are rounded to.
        device: Where they would be; it need not be there.
    """
    shape, layers = plain_shape(skeleton), list(skeleton.layers)
    total, unpacks = sum(rounded_bytes(layer, bits) for layer in layers), shape is None
    if shape is not None:
        dtype: torch.dtype = skeleton.model.dtype
        for layer in layers:
            for names in shape.family.products:
                matrices = [layer.get_parameter(f"{name}.weight").shape for name in names]
                unpacks |= rounded_kind(matrices, bits, device, dtype) is UnpackingProduct
    return PackedSize(total, max(map(unpacked_values, layers)) if unpacks else 0)


def norm_gain(weight: torch.Tensor, shape: PlainShape) -> torch.Tensor:
    """A norm's factors times the root of H, float32 [H]: for x over its length instead of its mean square."""
    return (weight.detach().float() + shape.family.from_one) * math.sqrt(len(weight))


def _fuse(given: Weights, shape: PlainShape, room: Callable[[], Scratch] | None) -> FusedLayer:
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

    def product(*names: str) -> Product:
        weights = [given[f"{name}.weight"] for name in names]
        return product_of(
            [w.detach() if isinstance(w, torch.Tensor) else w for w in weights],
            _joined([vector(f"{name}.bias") for name in names], [w.shape[0] for w in weights]),
            room,
        )

    before, after, between, last = map(norm, shape.family.norms)
    assert before is not None and between is not None
    qkv, out, gate_up, down = (product(*names) for names in shape.family.products)
    return FusedLayer(
        before=before,
        qkv=qkv,
        q_norm=head_norm("q"),
        k_norm=head_norm("k"),
        out=out,
        after=after,
        between=between,
        gate_up=gate_up,
        down=down,
        last=last,
    )


def _joined(biases: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor | None:
    """Biases of so many outputs each as one, zeros where there is none; None where there is none at all."""
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return None
    whole = [some.new_zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
    return torch.cat(whole)
