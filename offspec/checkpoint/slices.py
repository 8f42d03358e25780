"""Some elements of a weight's first dimension, rows or experts, as a weight of its own in the same bytes."""

from dataclasses import replace

from offspec.checkpoint.tensors import PackedInfo, TensorInfo, Weight


def can_slice(weight: Weight) -> bool:
    """Whether elements of its first dimension can be had alone, by `cut` and `slice_of`."""
    return weight.shape != () and weight.shape[0] > 0 and _cut(weight, 0, 1) is not None


def slice_of(weight: Weight, index: int) -> Weight:
    """Element `index` of a weight's first dimension, such as one expert of a layer, as a weight [1, ...]."""
    return replace(cut(weight, index, index + 1), name=f"{weight.name}[{index}]")


def cut(weight: Weight, start: int, end: int) -> Weight:
    """Elements [start, end) of a weight's first dimension: where they lie.

    Its name, and those of the tensors it is stored in, stay the same. Raises ValueError unless
    `can_slice(weight)`, IndexError for elements that it does not have.
    """
    if not weight.shape or not 0 <= start <= end <= weight.shape[0]:
        raise IndexError(f"{weight.name} of {list(weight.shape)} has no elements {start} to {end}")
    found = _cut(weight, start, end)
    if found is None:
        raise ValueError(f"{weight.name} cannot be unpacked in pieces")
    return found


def _cut(weight: Weight, start: int, end: int) -> Weight | None:
    if isinstance(weight, TensorInfo):
        return _range_of(weight, start, end)
    found = weight.format.cut(weight.shape, start, end)
    if found is None:
        return None
    format, ranges = found
    whole = weight.format.parts(weight.shape)
    parts = list[tuple[str, TensorInfo]]()
    for name, info in weight.parts:
        if name in ranges and info.shape[:1] != whole[name].shape[:1]:  # in another shape of as many numbers
            return None
        parts.append((name, _range_of(info, *ranges[name]) if name in ranges else info))
    return PackedInfo(weight.name, (end - start, *weight.shape[1:]), format, tuple(parts))


def _range_of(info: TensorInfo, start: int, end: int) -> TensorInfo:
    each = info.nbytes // info.shape[0]
    shape = (end - start, *info.shape[1:])
    return replace(info, shape=shape, offset=info.offset + start * each, nbytes=(end - start) * each)
