"""torch's operations on a simulated device: each becomes a task, executed by torch's operation for CPUs."""

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

_ON_HOST: dict[Any, Callable[..., Tensor]] = {  # operations that CPUs lack, or have under other names
    aten._convert_weight_to_int4pack.default: int4_matmul.arrange,
    aten._weight_int4pack_mm.default: int4_matmul.multiply,
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Facts from the schema of an operation: whether it makes a view, and which arguments it writes.

    composite: it consists of other operations. reshapes: it changes the shape of the tensor that it writes.
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
    """Run an operation with an argument on a device."""
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
    """Change a shape in place, of the tensor and of the host's view of it."""
    func(tensor.host, *args)
    host = tensor.host
    place = host.shape, host.stride(), host.storage_offset()
    aten.as_strided_.default.redispatch(_HOST_KEYS, tensor, *place)
    return tensor


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
    """Return the result of an operation that makes new tensors."""
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = torch.device(wanted)
        if wanted.type != "cuda":  # from arguments as for new_empty: only shapes matter
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
    """Return the shapes of an operation's results; computed once for each set of arguments."""
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
    """Return an argument as a key: tensors by their shapes; 1, 1.0 and True stay distinct."""
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
    """Run an operation whose result size the host must know, such as `nonzero`: the host waits."""
    of = machine()
    of.host_waits(func.name(), [of.current_queue(index).end])
    made = func(*_mapped(args, _host), **_mapped(kwargs, _host))
    return _mapped(made, lambda found: transfers.put(found, index))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy the value with its tensors replaced."""
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
    """Reduce a tensor to what a task needs when it is submitted."""
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
    """Return the device of all tensors. A number or an index in RAM may join them."""
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
    """Copy indices from RAM to the device, as torch does; this waits."""
    moved = [
        transfers.to_device(of, index, "index in RAM")
        if isinstance(of, Tensor) and not isinstance(of, DeviceTensor)
        else of
        for of in args[1]
    ]
    return args[0], moved, *args[2:]


def _wait_for_masks(func: Any, args: Sequence[Any]) -> None:
    """Wait as torch does to count a mask, unless a single number is written through it."""
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
    aten._fused_sdp_choice.default: lambda *args, **kwargs: 0,  # plain operations, which any device supports
}


# Factories, which take no tensor.


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
    """Return the device's version of an operation such as arange."""

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
