"""Rows on their way between devices, where the layers of a model are computed on more than one.

Letters: T rows of a pass, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offspec.model.attention import MergedContext, TreeContext, running, running_context

Layer = Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], Any]


class Hops:
    """Brings what a layer takes to where it is computed, and its rows to where the next one is.

    What several layers take, as positions and masks, is brought once a pass.

    Args:
        places: Where each layer is computed.
        home: Where the model's other parts are.
        cpu_mode: Entered around layers on a CPU, where some of torch's own functions would not do.
    """

    def __init__(
        self, places: Sequence[torch.device], home: torch.device, cpu_mode: TorchFunctionMode | None = None
    ) -> None:
        self.home = home
        self.places, self._cpu_mode = tuple(places), cpu_mode
        self._pass: TreeContext | None = None  # that everything below belongs to
        self._brought: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def run(
        self, index: int, layer: Layer, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `layer` makes of hidden states [..., T, H], with these where the layer behind it will be."""
        place, context = self.places[index], running_context()
        if context is None or context is not self._pass:
            self.forget()
            assert not isinstance(context, MergedContext), "a layer hops with all parts of a pass"
            self._pass = context
        args, kwargs = self.bring(args, place), self.bring(dict(kwargs), place)
        with self._on(place):
            out = layer(hidden.to(place), args, kwargs)
        after = self.places[index + 1] if index + 1 < len(self.places) else self.home
        return (out[0].to(after), *out[1:]) if isinstance(out, tuple) else out.to(after)

    def forget(self) -> None:
        """Let go of what was brought."""
        self._pass = None
        self._brought.clear()

    def bring(self, value: Any, place: torch.device) -> Any:
        """The same on a device. A dictionary stays the same object: layers may leave things in it."""
        if isinstance(value, torch.Tensor):
            return value if value.device == place else self._tensor(value, place)
        if isinstance(value, TreeContext):
            return value.on(place)
        if type(value) in (tuple, list):
            return type(value)(self.bring(item, place) for item in value)
        if isinstance(value, MutableMapping):  # transformers has one of its own for keys that layers share
            value.update({name: self.bring(item, place) for name, item in value.items()})
        return value

    @contextmanager
    def _on(self, place: torch.device) -> Iterator[None]:
        with ExitStack() as stack:
            if self._pass is not None:
                stack.enter_context(running(self._pass.on(place)))
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
    """Move buffers of layers to where those are computed, all others to `home`.

    Args:
        model: The model with these layers.
        layers: Decoder layers.
        places: Where each layer is computed.
        home: Where the model's other parts are.
    """
    layer_places = zip(places, layers, strict=True)
    place_of = {id(module): place for place, layer in layer_places for module in layer.modules()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(place_of.get(id(module), home))
