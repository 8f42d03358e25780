"""Transfer of activations between devices if a model's layers are computed on more than one.

Letters: T rows of a pass, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offspec.model.attention import MergedContext, TreeContext, current_context, pass_context

Layer = Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]


class DeviceTransfers:
    """Moves each layer's inputs to its device, and its output to the next layer's device.

    Inputs shared by several layers, such as positions and masks, are moved once per pass.

    Args:
        places: Compute device of each layer.
        home: Device of the rest of the model.
        cpu_mode: Mode entered around CPU layers, which replaces torch functions that give a row other bits.
    """

    def __init__(
        self, places: Sequence[torch.device], home: torch.device, cpu_mode: TorchFunctionMode | None = None
    ) -> None:
        self.home = home
        self.places, self._cpu_mode = tuple(places), cpu_mode
        self._pass: TreeContext | None = None  # that `_brought` belongs to
        self._brought: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(
        self, index: int, layer: Layer, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `layer` on hidden states [..., T, H]; return its output on the next layer's device."""
        place, context = self.places[index], current_context()
        if context is None or context is not self._pass:
            self.forget()
            assert not isinstance(context, MergedContext), "sequences must be merged after the transfer"
            self._pass = context
        args, kwargs = self.to_device(args, place), self.to_device(dict(kwargs), place)
        with self._on(place):
            out = layer(hidden.to(place), args, kwargs)
        after = self.places[index + 1] if index + 1 < len(self.places) else self.home
        return (out[0].to(after), *out[1:]) if isinstance(out, tuple) else out.to(after)

    def forget(self) -> None:
        """Release the tensors moved for the current pass."""
        self._pass = None
        self._brought.clear()

    def to_device(self, value: Any, place: torch.device) -> Any:
        """Move a value recursively. Updates dictionaries in place, because layers store values in them."""
        if isinstance(value, torch.Tensor):
            return value if value.device == place else self._tensor(value, place)
        if isinstance(value, TreeContext):
            return value.on(place)
        if type(value) in (tuple, list):
            return type(value)(self.to_device(item, place) for item in value)
        if isinstance(value, MutableMapping):  # includes transformers' own class for keys shared by layers
            value.update({name: self.to_device(item, place) for name, item in value.items()})
        return value

    @contextmanager
    def _on(self, place: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if self._pass is not None:
                stack.enter_context(pass_context(self._pass.on(place)))
            if place.type == "cuda":
                stack.enter_context(torch.cuda.device(place))  # where Triton launches its kernels
            elif self._cpu_mode is not None:
                stack.enter_context(self._cpu_mode)
            yield

    def _tensor(self, value: torch.Tensor, place: torch.device) -> torch.Tensor:
        known = self._brought.get((id(value), place))
        if known is None:
            there = value.to(place)
            known = self._brought[id(value), place] = (value, there)
            self._brought[id(there), value.device] = (there, value)
        return known[1]


def move_buffers(
    model: torch.nn.Module,
    layers: Iterable[torch.nn.Module],
    places: Sequence[torch.device],
    home: torch.device,
) -> None:
    """Move each layer's buffers to its compute device and all other buffers to `home`.

    Args:
        model: Model that contains the layers.
        layers: Decoder layers.
        places: Compute device of each layer.
        home: Device of the rest of the model.
    """
    layer_places = zip(places, layers, strict=True)
    place_of = {id(module): place for place, layer in layer_places for module in layer.modules()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(place_of.get(id(module), home))
