"""torch's operations on a simulated device: each becomes a task, which torch's own for CPUs carries out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from tests.support.simulated_cuda import int4_matmul, transfers
from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.machine import machine
from tests.support.simulated_cuda.tensors import DeviceTensor, Operand, new_tensor

aten, prim = torch.ops.aten, torch.ops.prim
_HOST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)

_ON_HOST: dict[Any, Callable[..., Tensor]] = {  # what CPUs have not, or under other names
    aten._convert_weight_to_int4pack.default: int4_matmul.arrange,
    aten._weight_int4pack_mm.default: int4_matmul.multiply,
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the schema of an operation says of it: whether it makes a view, and which arguments it writes.

    composite: it is made of others. reshapes: it changes the shape of what it writes.
    """

    view: bool
    composite: bool
    reshapes: bool
    writes: tuple[tuple[int, str], ...]


@cache
def _kind(func: Any) -> _Kind:
    schema, name = func._schema, func.name()
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    views = any(found.alias_info is not None and not found.alias_info.is_write for found in schema.returns)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has(name, "CompositeImplicitAutograd") and not has(name, "CPU")
    reshapes = torch.Tag.inplace_view in func.tags
    return _Kind((views and not writes) or func is aten._unsafe_view.default, composite, reshapes, writes)


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carry out an operation of which an argument is on a device."""
    if func is prim.device.default:
        return args[0].device
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    kind = _kind(func)
    if kind.composite:
        return func.decompose(*args, **kwargs)
    if kind.view:
        index = args[0].index
        return _mapped(func(args[0].host, *args[1:], **kwargs), lambda of: DeviceTensor(of, index))
    if kind.reshapes:
        return _reshaped(func, *args)
    index = _device_of(func, args, kwargs)
    if func in _INDEXED:
        args = _indices_moved(args, index)
    if not kind.writes:
        return _computed(func, args, kwargs, index)
    _wait_for_masks(func, args)
    _launch(func, args, kwargs, index)
    written = [args[place] if place < len(args) else kwargs[name] for place, name in kind.writes]
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written[:count])


def _reshaped(func: Any, tensor: DeviceTensor, *args: Any) -> DeviceTensor:
    """A shape that changes in place, of the tensor and of what the host sees of it."""
    func(tensor.host, *args)
    host = tensor.host
    place = host.shape, host.stride(), host.storage_offset()
    aten.as_strided_.default.redispatch(_HOST_KEYS, tensor, *place)
    return tensor


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
    """The result of an operation that makes new tensors."""
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = torch.device(wanted)
        if wanted.type != "cuda":  # as new_empty may be told: only shapes matter
            return func(*_mapped(args, _host), **_mapped(kwargs, _host))
        index = index if wanted.index is None else wanted.index
        kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        shapes = _shapes(func, args, kwargs)
    except (NotImplementedError, RuntimeError, DynamicOutputShapeException):
        return _run_now(func, args, kwargs, index)
    outs = _mapped(
        shapes, lambda shape: new_tensor(shape.size, shape.stride, shape.dtype, index, written=True)
    )
    _launch(func, args, kwargs, index, outs)
    return outs


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Shape":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


_known: dict[Any, Any] = {}


def _shapes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation makes, with shapes for tensors; worked out once for each set of arguments."""
    key = func, _frozen(args), _frozen(tuple(kwargs.items()))
    if key not in _known:
        with torch.inference_mode(False), torch.no_grad():
            stand_in = _ON_HOST.get(func, func)
            made = stand_in(*_mapped(args, _meta), **{**_mapped(kwargs, _meta), **_named_meta(kwargs)})
        _known[key] = _mapped(made, _Shape.of)
    return _known[key]


def _named_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": "meta"} if kwargs.get("device") is not None else {}


def _frozen(value: Any) -> Any:
    """An argument as a key: of tensors their shapes, and 1, 1.0 and True kept apart."""
    if isinstance(value, Tensor):
        return _Shape.of(value)
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return type(value), value


def _launch(func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int, outs: Any = ()) -> None:
    some, named = _mapped(args, _as_operand), _mapped(kwargs, _as_operand)
    places = [Operand.of(out) for out in _tensors(outs)]

    def run() -> None:
        made = _ON_HOST.get(func, func)(*_mapped(some, _now), **_mapped(named, _now))
        if places:
            for place, found in zip(places, _tensors(made), strict=True):
                place.tensor().copy_(found)

    machine().launch(func.name(), run, index)
    machine().check_launch()


def _run_now(func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
    """What the host must know the numbers for, as the size of what `nonzero` finds: it waits."""
    of = machine()
    of.host_waits(func.name(), [of.current_queue(index).end])
    made = func(*_mapped(args, _host), **_mapped(kwargs, _host))
    return _mapped(made, lambda found: transfers.put(found, index))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with its tensors changed, and what stands for them."""
    if isinstance(value, Tensor | Operand | _Shape):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(of, change) for of in value])
    if type(value) is dict:
        return {key: _mapped(of, change) for key, of in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [of for inner in value for of in _tensors(inner)] if isinstance(value, list | tuple) else []


def _as_operand(value: Tensor) -> Any:
    """What a task is told of a tensor when it is submitted."""
    return Operand.of(value) if isinstance(value, DeviceTensor) else value.detach().clone()


def _now(value: Any) -> Any:
    return value.tensor() if isinstance(value, Operand) else value


def _host(value: Tensor) -> Tensor:
    return value.host if isinstance(value, DeviceTensor) else value


def _meta(value: Tensor) -> Tensor:
    if not isinstance(value, DeviceTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _device_of(func: Any, args: Any, kwargs: Any) -> int:
    """The device of all tensors. A number in RAM may join them, and what is an index."""
    found: set[str] = set()
    index = 0
    for value in _tensors((args, kwargs)):
        if isinstance(value, DeviceTensor):
            index = value.index
            found.add(f"cuda:{index}")
        elif value.dim() and func not in _INDEXED:
            found.add(str(value.device))
    if func in _INDEXED and not isinstance(args[0], DeviceTensor):
        raise SimulatedCudaError(
            "indices should be either on cpu or on the same device as the indexed tensor"
        )
    if len(found) > 1:
        raise SimulatedCudaError(
            "Expected all tensors to be on the same device, but found "
            f"{' and '.join(sorted(found))} in {func}"
        )
    return index


def _indices_moved(args: Sequence[Any], index: int) -> Sequence[Any]:
    """Indices that lie in RAM are copied to the device, as torch does, which waits."""
    moved = [
        transfers.to_device(of, index, "index in RAM")
        if isinstance(of, Tensor) and not isinstance(of, DeviceTensor)
        else of
        for of in args[1]
    ]
    return args[0], moved, *args[2:]


def _wait_for_masks(func: Any, args: Sequence[Any]) -> None:
    """Writing through a mask counts what it shows, unless it is one number that is written."""
    if func not in _INDEXED:
        return
    masks = [of for of in args[1] if isinstance(of, Tensor) and of.dtype in (torch.bool, torch.uint8)]
    if masks and not (len(args[1]) == 1 and args[2].numel() == 1):
        machine().host_waits("write through a mask", [machine().current_queue(args[0].index).end])


def _number(tensor: DeviceTensor) -> Any:
    of = machine()
    of.host_waits("item", [of.current_queue(tensor.index).end])
    return tensor.host.item()


def _equal(first: Tensor, second: Tensor) -> bool:
    index = _device_of(aten.equal.default, (first, second), {})
    machine().host_waits("equal", [machine().current_queue(index).end])
    return torch.equal(_host(first), _host(second))


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _number,
    aten.equal.default: _equal,
    aten.copy_.default: transfers.copy,
    aten._to_copy.default: transfers.to_copy,
    aten.is_pinned.default: _never,
    aten.detach_.default: lambda tensor: tensor,
    aten._fused_sdp_choice.default: lambda *args, **kwargs: 0,  # plain operations, which any device has
}


# What makes tensors of nothing, and is not asked of any tensor.


def empty(size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
    steps, step = [], 1
    for count in reversed(size):
        steps.append(step)
        step *= max(count, 1)
    return empty_strided(size, steps[::-1], dtype, device)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    device: Any = None,
    **more: Any,
) -> Tensor:
    return new_tensor(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), _index(device))


def factory(func: Any) -> Callable[..., Tensor]:
    """How a device carries out an operation such as arange."""

    def make(
        *args: Any, device: Any = None, pin_memory: Any = None, layout: Any = None, **kwargs: Any
    ) -> Any:
        return _computed(
            func, args, {**kwargs, "device": torch.device("cuda", _index(device))}, _index(device)
        )

    return make


def _index(device: Any) -> int:
    index = None if device is None else torch.device(device).index
    return machine().device if index is None else index
