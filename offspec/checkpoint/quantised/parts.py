"""What all methods of quantisation share: finding a weight's tensors, reading small ones, checking them."""

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

FLOATS = ("F64", "F32", "F16", "BF16")  # dtypes whose numbers are values, and no codes for them
# What to do about a checkpoint in a form that is not read, and about one that is damaged.
INSTEAD = "use the model's bf16 or fp16 checkpoint, or a GGUF file of it"
AGAIN = "download it again"
# A block of 129 rows may need as many scales as one of 128: only what GPUs can use is accepted.
BLOCK_UNIT = 16
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class Found:
    """A weight that was found. spent: names of all the tensors that it is made of or described by."""

    weight: PackedInfo
    spent: frozenset[str]


def need(tensors: Tensors, name: str) -> TensorInfo:
    """The tensor of that name. Raises MissingTensorError."""
    if name not in tensors:
        raise MissingTensorError(
            f"the checkpoint lacks {name[:200]!r}, without which the weight cannot be unpacked; "
            "download it again"
        )
    return tensors[name]


def packed_weight(
    name: str,
    shape: tuple[int, ...],
    make: Callable[[], Format],
    parts: Mapping[str, TensorInfo],
    besides: Iterable[str] = (),
) -> Found:
    """A weight of this name and shape in these parts, as the format calls them, each checked.

    make: calls the format's class, which refuses what it cannot read. besides: other tensors that describe
    the weight. Raises HeaderError, which names the tensor that is wrong and its file.
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
        # Where the format has no such form, or no weight of this shape, another copy would be no better.
        fix = INSTEAD if packed_as is None or error.argument == "shape" else AGAIN
        bad_tensor(wrong, f"cannot be part of the weight {name[:200]!r} ({one_line(error)})", fix)
    spent = frozenset([*besides, *(part.name for part in parts.values())])
    return Found(PackedInfo(name, shape, packed_as, tuple(parts.items())), spent)


def pairs_of_bytes(codes: TensorInfo) -> tuple[int, int]:
    """Rows and columns of a weight whose bytes have two codes each. Raises HeaderError."""
    if len(codes.shape) != 2:
        bad_tensor(codes, f"must have two dimensions, not {list(codes.shape)}")
    return codes.shape[0], 2 * codes.shape[1]


def bad_tensor(info: TensorInfo, what: str, fix: str = AGAIN) -> NoReturn:
    """Raise HeaderError about a tensor, naming its file."""
    raise HeaderError(f"{info.file}: the tensor {info.name[:200]!r} {what}; {fix}")


def read_bytes(info: TensorInfo, most: int) -> bytes:
    """A small tensor's bytes. Raises HeaderError where it has more than `most`, CheckpointError."""
    if info.nbytes > most:
        bad_tensor(info, f"has {info.nbytes:,} bytes, too many to be true")
    with open_to_read(info.file) as file:
        file.seek(info.offset)
        data = file.read(info.nbytes)
    if len(data) < info.nbytes:
        raise TruncatedError(f"{info.file} is cut short at the tensor {info.name[:200]!r}; download it again")
    return data


def read_integers(info: TensorInfo, most: int) -> np.ndarray[Any, Any]:
    """A small tensor of int32 or int64, [numbers]; `most` of them. Raises as `read_bytes` does."""
    import numpy as np

    if info.dtype not in _INTEGERS or len(info.shape) != 1:
        bad_tensor(info, f"must be a list of integers, and is {info.dtype} {list(info.shape)}")
    kind = np.dtype(_INTEGERS[info.dtype])
    return np.frombuffer(read_bytes(info, most * kind.itemsize), kind)


def setting(settings: Mapping[str, Any], *names: str, usual: int) -> int:
    """A whole number of a configuration under the first of these names it has. Raises HeaderError."""
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if type(value) is not int or not -1 <= value < 2**31:
            bad_setting(name, value)
        return value
    return usual


def even_steps(settings: Mapping[str, Any]) -> tuple[Format, ...]:
    """The size of weights in `bits` of a configuration; other codes with scales take about as much."""
    from offspec_kernels.dequant.grouped import BITS, Grouped

    bits = settings.get("bits")
    return (Grouped(bits if bits in BITS else 8),)


def bad_setting(name: str, value: object) -> NoReturn:
    """Raise HeaderError about a value in a quantization_config."""
    raise HeaderError(
        f"config.json: {name} of quantization_config cannot be {' '.join(repr(value)[:60].split())}; "
        "download it again"
    )


def order_of(info: TensorInfo, group: int) -> bool:
    """Whether a `g_idx`, the group of each input, int32 [in], is another than one group after the other.

    group: inputs in one. Raises HeaderError where it names a group that is not there.
    """
    import numpy as np

    index = read_integers(info, most=2**24)
    groups = -(-len(index) // max(group, 1))
    if len(index) and (index.min() < 0 or index.max() >= groups):
        wrong = int(index.min() if index.min() < 0 else index.max())
        bad_tensor(info, f"names group {wrong}, and there are {groups}")
    return not np.array_equal(index, np.arange(len(index)) // max(group, 1))
