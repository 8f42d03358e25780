"""Types of llama.cpp's GGUF files: rows split into blocks of a fixed number of bytes.

Format: https://github.com/ggml-org/ggml, except for types with a codebook of 256 entries or more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.errors import ArgumentError

# Values per block, and bytes per block.
LAYOUTS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
KINDS = (*LAYOUTS, *FLOATS)


def layout(kind: str) -> tuple[int, int]:
    """Return values and bytes per block of one of KINDS; a float is a block of its own."""
    return LAYOUTS[kind] if kind in LAYOUTS else (1, FLOATS[kind].itemsize)


@dataclass(frozen=True, slots=True)
class Ggml(Format):
    """Tensor of a GGUF file, of one of KINDS.

    Parts of a weight [..., columns], columns a multiple of a block's values: blocks uint8 [..., bytes of a
    row].

    heads: number of heads of a query or key weight [rows, columns], or of its bias [rows] if of floats.
    llama.cpp interleaves the rows of the two halves of a head; the values are returned as in transformers,
    one half after the other. 0: rows are already in order. less_one: subtract 1 from the values, for norms
    that add 1 to their weight, which llama.cpp has already added; floats only.
    """

    kind: str
    heads: int = 0
    less_one: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError("kind", f"must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.heads < 0:
            raise ArgumentError("heads", f"must be 0 or more, not {self.heads}")
        if self.less_one and self.kind not in FLOATS:
            raise ArgumentError("less_one", f"requires {', '.join(FLOATS)}, not {self.kind}")

    @property
    def name(self) -> str:
        return self.kind

    @property
    def by_rows(self) -> bool:
        return self.heads == 0

    def parts(self, shape: Shape) -> dict[str, Part]:
        size, nbytes = layout(self.kind)
        if not shape or shape[-1] % size:
            raise ArgumentError(
                "shape", f"rows of {list(shape)} are not a multiple of the {self.kind} block size {size}"
            )
        dimensions = (1, 2) if self.kind in FLOATS else (2,)
        if self.heads and (len(shape) not in dimensions or shape[0] % (2 * self.heads)):
            raise ArgumentError(
                "shape", f"{list(shape)} cannot be split into {self.heads} heads of two halves"
            )
        return {"blocks": Part(torch.uint8, (*shape[:-1], shape[-1] // size * nbytes))}

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        from offspec_kernels.dequant.ggml.reference import DECODERS

        if self.kind in FLOATS:
            return self._floats(parts["blocks"], shape).float()
        blocks = parts["blocks"].view(-1, LAYOUTS[self.kind][1])
        return self._ordered(DECODERS[self.kind](blocks).view(shape))

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        if self.kind in FLOATS:
            out.copy_(self._floats(parts["blocks"], shape))
        else:
            self.fill_by_rows(parts, shape, out)

    def column_multiple(self, shape: Shape) -> int:
        return LAYOUTS[self.kind][0] if self.kind in LAYOUTS else 0

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        if self.kind in FLOATS:
            out.copy_(self._floats(parts["blocks"], shape))
        else:
            Format.triton(self, parts, shape, out)

    def _floats(self, blocks: Tensor, shape: Shape) -> Tensor:
        """Return a float tensor's values in its own dtype, or in float32 if they are transformed."""
        dtype = FLOATS[self.kind]
        if blocks.storage_offset() % dtype.itemsize:  # torch views bytes as floats only at aligned offsets
            blocks = blocks.clone()
        values = blocks.view(dtype).view(shape)
        return self._ordered(values.float() - 1 if self.less_one else values)

    def _ordered(self, values: Tensor) -> Tensor:
        if not self.heads:
            return values
        pairs = values.view(self.heads, -1, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
