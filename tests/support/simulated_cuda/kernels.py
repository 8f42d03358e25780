"""offspec's Triton kernels on a simulated device, executed by the operations' paths for CPUs.

A launcher runs unchanged, with its workspace, its tables and their uploads; only its launches are counted and
skipped. One task follows, which passes the arguments, as they are on the device by then, to an equivalent
function, and copies the result to the launcher's output.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import Tensor

from tests.support.simulated_cuda.errors import SimulatedCudaError
from tests.support.simulated_cuda.machine import machine
from tests.support.simulated_cuda.tensors import DeviceTensor, Operand

_inside = threading.local()


def install_kernels() -> None:
    """Use the path for CPUs in launchers whose tensors are on a simulated device, from now on."""
    from offspec_kernels import dequant
    from offspec_kernels.dequant.format import Format
    from offspec_kernels.gumbel_argmax import triton as gumbel
    from offspec_kernels.kv_compact import triton as compact
    from offspec_kernels.row_linear import triton as linear
    from offspec_kernels.topk_children import triton as topk
    from offspec_kernels.tree_attention import triton as attention
    from offspec_kernels.tree_attention import triton_exact as exact
    from offspec_kernels.tree_conv import triton as conv
    from offspec_kernels.tree_scan import triton as scan
    from tests.support.simulated_cuda import cpu_kernels

    for module, name, twin in (
        (attention, "attend", cpu_kernels.attend),
        (exact, "attend", cpu_kernels.attend_exactly),
        (linear, "row_linear", cpu_kernels.row_linear),
        (linear, "grouped_linear", cpu_kernels.grouped_linear),
        (scan, "tree_scan", cpu_kernels.tree_scan),
        (conv, "tree_conv", cpu_kernels.tree_conv),
        (topk, "children", cpu_kernels.children),
        (gumbel, "pick", cpu_kernels.pick),
        (compact, "move", cpu_kernels.move),
    ):
        setattr(module, name, _through(getattr(module, name), twin))
    for family in iter_modules(dequant.__path__):
        import_module(f"{dequant.__name__}.{family.name}")
    for format in _formats(Format):
        if "triton" in vars(format):
            format.triton = _through(format.triton, cpu_kernels.dequantize)
    _intercept_launches()


def _formats(of: Any) -> list[Any]:
    subclasses: list[Any] = of.__subclasses__()
    return [each for sub in subclasses for each in (sub, *_formats(sub))]


def _through(launcher: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a launcher for tensors of simulated devices; calls with host tensors pass through."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        devices = {of.index for of in _tensors((args, kwargs)) if isinstance(of, DeviceTensor)}
        if not devices:
            return launcher(*args, **kwargs)
        with _no_launches() as launches:
            result = launcher(*args, **kwargs)
        told, places = _mapped((args, kwargs), _place), _mapped(result, _place)

        def run() -> None:
            some, named = _mapped(told, _there)
            found = twin(*some, **named)
            for place, value in zip(_tensors(places), _tensors(found), strict=places is not None):
                place.tensor().copy_(value)

        machine().launch(f"{twin.__name__} as a kernel", run, devices.pop(), counted=launches[0])
        return result

    return launch


@contextmanager
def _no_launches() -> Any:
    """Count and skip kernels launched by this thread."""
    counted = _inside.counted = [0]
    try:
        yield counted
    finally:
        _inside.counted = None


def _intercept_launches() -> None:
    """Run kernels without a host version in Triton's interpreter, as a task."""
    from triton.runtime import interpreter

    interpret = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        pointers = [of for of in (*args, *kwargs.values()) if isinstance(of, Tensor)]
        if not any(isinstance(of, DeviceTensor) for of in pointers):
            interpret(self, *args, **kwargs)
            return
        name = getattr(self.fn, "__name__", "kernel")
        for of in pointers:
            if not isinstance(of, DeviceTensor):
                raise ValueError(f"Pointer argument of {name} cannot be accessed from Triton (cpu tensor?)")
            if of.index != machine().device:
                raise SimulatedCudaError(
                    f"{name} is launched on cuda:{machine().device}, and an argument is on cuda:{of.index}"
                )
        counted = getattr(_inside, "counted", None)
        if counted is not None:
            counted[0] += 1
            return
        some, named = _mapped((args, kwargs), _place)
        # Look it up when called: others may have replaced it, too.
        machine().launch(name, lambda: self(*_mapped(some, _alone), **_mapped(named, _alone)))

    interpreter.GridExecutor.__call__ = call


def _place(of: Any) -> Any:
    return Operand.of(of) if isinstance(of, DeviceTensor) else of


def _there(of: Any) -> Any:
    return of.tensor() if isinstance(of, Operand) else of


def _alone(of: Any) -> Any:
    return of.tensor(alone=True) if isinstance(of, Operand) else of


def _tensors(value: Any) -> list[Any]:
    """All tensors and operands in a value."""
    found: list[Any] = []

    def see(of: Any) -> Any:
        found.append(of)
        return of

    _mapped(value, see)
    return found


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy the value with each tensor and operand changed; caches start empty."""
    from offspec_kernels.kv_compact import KVTable

    def inner(of: Any) -> Any:
        return _mapped(of, change)

    match value:
        case Tensor() | Operand():
            return change(value)
        case KVTable():
            return _Table(map(inner, value.views))
        case _Table():
            return KVTable(list(map(inner, value)))
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(inner, value))
        case tuple() | list():
            return type(value)(map(inner, value))
        case dict():
            return {key: inner(of) for key, of in value.items()}
        case Sequence() | type():
            return value
    if (
        not is_dataclass(value)
        or isinstance(value, type)
        or not any(isinstance(getattr(value, field.name), Tensor | Operand) for field in fields(value))
    ):
        return value
    return type(value)(
        **{field.name: inner(getattr(value, field.name)) for field in fields(value) if field.compare}
    )


class _Table(tuple[Any, ...]):
    """The views of a KVTable, as operands."""
