"""Functions shared by all quantization methods: finding, reading and checking a weight's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from offspec.checkpoint.ranges import one_line
from offspec.checkpoint.tensors import PackedInfo, TensorInfo, torch_dtype
from offspec.core.errors import HeaderError, MissingTensorError, TruncatedError
from offspec.core.files import open_to_read

if TYPE_CHECKING:
    import numpy as np

    from offspec_kernels.dequant import Format

Tensors = Mapping[str, TensorInfo]

FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes of values, as opposed to codes
# Advice for an unsupported checkpoint, and for a damaged one.
INSTEAD = "use the model's bf16 or fp16 checkpoint, or a GGUF file of it"
AGAIN = "download it again"
# A block of 129 rows may need as many scales as a block of 128. Only sizes that GPUs can use are accepted.
BLOCK_UNIT = 16
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class FoundWeight:
    """A quantized weight. consumed: names of all the tensors that store or describe it."""

    weight: PackedInfo
    consumed: frozenset[str]


def require_tensor(tensors: Tensors, name: str) -> TensorInfo:
    """Return the tensor of that name. Raises MissingTensorError."""
    if name not in tensors:
        raise MissingTensorError(
            f"the checkpoint lacks {name[:200]!r}, which is needed to dequantize the weight; "
            "download it again"
        )
    return tensors[name]


def packed_weight(
    name: str,
    shape: tuple[int, ...],
    make: Callable[[], Format],
    parts: Mapping[str, TensorInfo],
    others: Iterable[str] = (),
) -> FoundWeight:
    """Return the weight of this name and shape, after checking its parts.

    make: calls the format's class, which refuses unsupported variants. parts: by the format's names. others:
    other tensors that describe the weight. Raises HeaderError that names the wrong tensor and its file.
    """
    from offspec_kernels.dequant import Part
    from offspec_kernels.errors import ArgumentError

    packed_as: Format | None = None
    try:
        packed_as = make()
        packed_as.check(
            {part: Part(torch_dtype(info.dtype), info.shape) for part, info in parts.items()}, shape
        )
    except ArgumentError as error:
        wrong = parts.get(error.argument) or next(iter(parts.values()))
        # If the format has no such variant, or no weight of this shape, another download would not help.
        fix = INSTEAD if packed_as is None or error.argument == "shape" else AGAIN
        bad_tensor(wrong, f"cannot be part of the weight {name[:200]!r} ({one_line(error)})", fix)
    consumed = frozenset([*others, *(part.name for part in parts.values())])
    return FoundWeight(PackedInfo(name, shape, packed_as, tuple(parts.items())), consumed)


def matrix_shape(info: TensorInfo) -> tuple[int, int]:
    """Return rows and columns of a tensor. Raises HeaderError if it is not a matrix."""
    if len(info.shape) != 2:
        bad_tensor(info, f"must have two dimensions, not {list(info.shape)}")
    return info.shape[0], info.shape[1]


def pairs_of_bytes(codes: TensorInfo) -> tuple[int, int]:
    """Return rows and columns of a weight whose bytes hold two codes each. Raises HeaderError."""
    rows, columns = matrix_shape(codes)
    return rows, 2 * columns


def bad_tensor(info: TensorInfo, what: str, fix: str = AGAIN) -> NoReturn:
    """Raise HeaderError about a tensor, naming its file."""
    raise HeaderError(f"{info.file}: the tensor {info.name[:200]!r} {what}; {fix}")


def read_bytes(info: TensorInfo, most: int) -> bytes:
    """Return a small tensor's bytes. Raises HeaderError if it has more than `most`, CheckpointError."""
    if info.nbytes > most:
        bad_tensor(info, f"is implausibly large ({info.nbytes:,} bytes)")
    with open_to_read(info.file) as file:
        file.seek(info.offset)
        data = file.read(info.nbytes)
    if len(data) < info.nbytes:
        raise TruncatedError(f"{info.file} is cut short at the tensor {info.name[:200]!r}; download it again")
    return data


def read_integers(info: TensorInfo, most: int) -> np.ndarray[Any, Any]:
    """Return a small int32 or int64 tensor of at most `most` numbers. Raises as `read_bytes` does."""
    import numpy as np

    if info.dtype not in _INTEGERS or len(info.shape) != 1:
        bad_tensor(info, f"must be a list of integers, and is {info.dtype} {list(info.shape)}")
    kind = np.dtype(_INTEGERS[info.dtype])
    return np.frombuffer(read_bytes(info, most * kind.itemsize), kind)


def setting(settings: Mapping[str, Any], *names: str, usual: int) -> int:
    """Return an integer of a configuration, by the first of these names that is set. Raises HeaderError."""
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if type(value) is not int or not -1 <= value < 2**31:
            bad_setting(name, value)
        return value
    return usual


def uniform_formats(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """Return a format with as many `bits` as a configuration; other codes with scales are about as large."""
    from offspec_kernels.dequant.grouped import BITS, Grouped

    bits = settings.get("bits")
    return (Grouped(bits if bits in BITS else 8),)


def bad_setting(name: str, value: object) -> NoReturn:
    """Raise HeaderError about a value in a quantization_config."""
    raise HeaderError(
        f"config.json: {name} of quantization_config cannot be {' '.join(repr(value)[:60].split())}; "
        "download it again"
    )


def has_act_order(info: TensorInfo, group: int) -> bool:
    """Return whether a `g_idx` (the group of each input, int32 [in]) differs from consecutive groups.

    group: inputs per group. Raises HeaderError if it names a group that does not exist.
    """
    import numpy as np

    index = read_integers(info, most=2**24)
    groups = -(-len(index) // max(group, 1))
    if len(index) and (index.min() < 0 or index.max() >= groups):
        wrong = int(index.min() if index.min() < 0 else index.max())
        bad_tensor(info, f"names group {wrong}, but there are {groups}")
    return not np.array_equal(index, np.arange(len(index)) // max(group, 1))
