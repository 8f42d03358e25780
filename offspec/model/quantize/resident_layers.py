"""Weights of a draft kept in memory, its matrices rounded to few bits."""

from collections.abc import Callable, Sequence

import torch

from offspec.core.memory import trim
from offspec.model.binding import Binder
from offspec.model.quantize.calibration import InputMoments
from offspec.model.quantize.rounding import RoundedMatrix, packed_bytes, packs, round_matrix, rounded, unpack
from offspec.model.unpacking import ModuleUnpacker, Scratch
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.ring import RingStats


def rounded_bytes(layer: torch.nn.Module, bits: int) -> int:
    """Bytes of a layer's weights once all of them are rounded that can be."""
    return sum(packed_bytes(w.shape, bits) if packs(w.shape) else w.nbytes for w in layer.parameters())


def unpacked_values(layer: torch.nn.Module) -> int:
    """Values of the module with the most rounded weights, which is unpacked at once."""
    return max(
        sum(w.numel() for w in module.parameters(recurse=False) if packs(w.shape))
        for module in layer.modules()
    )


class RoundedLayers:
    """Every layer kept in memory with its matrices rounded to `bits`: the weights of a draft.

    The first pass, over a text to calibrate on, is what loads it: each layer is read, runs once as it is
    on disk while its inputs are measured, and is rounded as it is left. What cannot be rounded stays as it
    is: see `packs`. expand: keep the rounded values in the model's dtype, 16 bits each, which is faster by
    the cost of unpacking; else keep them packed and unpack each module's just before it runs.
    """

    read_stats = ring_stats = RingStats()  # nothing streams

    def __init__(
        self,
        binders: list[Binder],
        layers: Sequence[torch.nn.Module],
        reader: DirectReader,
        bits: int,
        expand: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self._binders, self._layers, self._reader = binders, layers, reader
        self._bits, self._expand, self._progress = bits, expand, progress
        self._loaded = 0
        self._loading: tuple[dict[str, torch.Tensor], InputMoments] | None = None
        self._unpackers: list[ModuleUnpacker] = []
        self._scratch: Scratch | None = None

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers that have their weights at all times: all that are loaded."""
        return tuple(range(self._loaded))

    def enter(self, layer: int) -> None:
        if layer == 0 and self._scratch is not None:
            self._scratch.taken = 0  # Ctrl-C may have broken the pass before off
        if layer == self._loaded:
            binder = self._binders[layer]
            tensors = binder.realise(read_unit(binder.layout, self._reader).tensor)
            binder.bind(tensors)
            self._loading = tensors, InputMoments(self._layers[layer])

    def leave(self, layer: int) -> None:
        if self._loading is not None:
            self._round(layer, *self._loading)
            self._loading = None

    def _round(self, layer: int, tensors: dict[str, torch.Tensor], moments: InputMoments) -> None:
        moments.close()
        binder, packed = self._binders[layer], dict[str, dict[str, RoundedMatrix]]()
        for name, tensor in tensors.items():
            if not packs(tensor.shape):
                binder.bind({name: tensor.clone()})  # what it is a view of is freed
                continue
            inner = name.removeprefix(binder.prefix)
            importance = moments.importance(inner, tensor)
            if self._expand:
                binder.bind({name: rounded(tensor, self._bits, importance)})
            else:
                found = round_matrix(tensor, self._bits, importance)
                packed.setdefault(inner.rpartition(".")[0], {})[name] = found
        for module, weights in packed.items():
            self._keep_packed(layer, module, weights)
        self._loaded += 1
        trim()  # the scratch of rounding, layer by layer, would otherwise stay on the heap
        self._progress(layer + 1, len(self._binders))

    def _keep_packed(self, layer: int, module: str, weights: dict[str, RoundedMatrix]) -> None:
        """Have the weights of one module unpacked whenever it runs."""
        binder = self._binders[layer]
        binder.unbind(weights)
        first = next(iter(weights.values()))
        if self._scratch is None:
            most, device = max(map(unpacked_values, self._layers)), first.parts["codes"].device
            self._scratch = Scratch(most, first.dtype, device)
        unpacker = ModuleUnpacker(
            self._layers[layer].get_submodule(module),
            sum(packed.shape.numel() for packed in weights.values()),
            lambda out: {name: unpack(packed, out(packed.shape.numel())) for name, packed in weights.items()},
            binder.bind,
            lambda: binder.unbind(weights),
        )
        unpacker.install(self._scratch)
        self._unpackers.append(unpacker)

    def recover(self) -> None:
        """Nothing streams here."""

    def close(self) -> None:
        for unpacker in self._unpackers:
            unpacker.remove()
        for binder in self._binders:
            binder.close()
        self._unpackers.clear()
        self._scratch = None
