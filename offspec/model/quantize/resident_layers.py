"""Weights of a draft kept in memory, its matrices rounded to few bits."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from offspec.core.memory import trim
from offspec.model.binding import Binder
from offspec.model.quantize.calibration import InputMoments
from offspec.model.quantize.kept import KeptRounding, RoundedLayer
from offspec.model.quantize.rounding import RoundedMatrix, packed_bytes, packs, round_matrix, unpack
from offspec.model.unpacking import ModuleUnpacker, Scratch
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.workers import BytesMoved, RingStats


def rounded_bytes(layer: torch.nn.Module, bits: int) -> int:
    """Bytes of a layer's weights once all of them are rounded that can be."""
    return sum(
        packed_bytes(w.shape, bits) if packs(name, w.shape) else w.nbytes
        for name, w in layer.named_parameters()
    )


def unpacked_values(layer: torch.nn.Module) -> int:
    """Values of the module with the most rounded weights, which is unpacked at once."""
    values = Counter[str]()
    for name, weight in layer.named_parameters():
        values[name.rpartition(".")[0]] += weight.numel() if packs(name, weight.shape) else 0
    return max(values.values())


class RoundedLayers:
    """Every layer kept in memory with its matrices rounded to `bits`: the weights of a draft.

    The first pass, over a text to calibrate on, is what loads it: each layer is read, runs once as it is
    on disk while its inputs are measured, and is rounded as it is left. What cannot be rounded stays as it
    is: see `packs`. expand: keep the rounded values in the model's dtype, 16 bits each, which is faster by
    the cost of unpacking; else keep them packed and unpack each module's just before it runs. kept:
    takes what was rounded, for the next start.
    """

    ring_stats = RingStats()  # nothing streams
    bytes_moved, unpinned_bytes = BytesMoved(), 0

    def __init__(
        self,
        binders: list[Binder],
        layers: Sequence[torch.nn.Module],
        reader: DirectReader,
        bits: int,
        expand: bool,
        progress: Callable[[int, int], None],
        kept: KeptRounding | None = None,
    ) -> None:
        self._binders, self._layers, self._reader = binders, layers, reader
        self._bits, self._expand, self._progress = bits, expand, progress
        self._kept = kept
        self._loading: tuple[dict[str, torch.Tensor], InputMoments] | None = None
        self._packed: list[dict[str, RoundedMatrix]] = []
        self._unpackers: list[list[ModuleUnpacker]] = []
        self._waiting: list[ModuleUnpacker] = []  # those that are not at work yet
        self._scratch: Scratch | None = None

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers that have their weights at all times: all that are loaded."""
        return tuple(range(len(self._packed)))

    def enter(self, layer: int) -> None:
        if layer == 0 and self._packed:
            if self._scratch is not None:
                self._scratch.taken = 0  # Ctrl-C may have broken the pass before off
            for unpacker in self._waiting:
                unpacker.install(self.room())
            self._waiting.clear()
        if layer == len(self._packed):
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
        binder, found = self._binders[layer], RoundedLayer()
        for name, tensor in tensors.items():
            if packs(name, tensor.shape):
                importance = moments.importance(name.removeprefix(binder.prefix), tensor)
                found[name] = round_matrix(tensor, self._bits, importance)
            else:
                found[name] = tensor.clone()  # what it is a view of is freed
        binder.unbind()
        tensors.clear()
        if self._kept is not None:
            self._kept.add(layer, found)
        self._take(layer, found)

    def load_kept(self, kept: KeptRounding) -> None:
        """Take all layers as they were rounded before. Raises StreamError."""
        for layer, binder in enumerate(self._binders):
            self._take(layer, kept.read(layer, binder.device))

    def _take(self, layer: int, found: RoundedLayer) -> None:
        """Have a layer of rounded weights at its place."""
        binder = self._binders[layer]
        packed, by_module = dict[str, RoundedMatrix](), dict[str, dict[str, RoundedMatrix]]()
        for name, weight in found.items():
            if isinstance(weight, torch.Tensor) or self._expand:
                binder.bind({name: weight if isinstance(weight, torch.Tensor) else unpack(weight)})
                continue
            inner = name.removeprefix(binder.prefix)
            packed[inner] = weight
            by_module.setdefault(inner.rpartition(".")[0], {})[name] = weight
        self._packed.append(packed)
        self._unpackers.append([self._unpacker(layer, *of) for of in by_module.items()])
        self._waiting += self._unpackers[-1]
        trim()  # the scratch of rounding, layer by layer, would otherwise stay on the heap
        self._progress(layer + 1, len(self._binders))

    def _unpacker(self, layer: int, module: str, weights: dict[str, RoundedMatrix]) -> ModuleUnpacker:
        """Has the weights of one module unpacked whenever it runs."""
        binder, sizes = self._binders[layer], {name: of.shape.numel() for name, of in weights.items()}
        binder.unbind(weights)
        return ModuleUnpacker(
            self._layers[layer].get_submodule(module),
            sum(sizes.values()),
            lambda out: {name: unpack(packed, out(sizes[name])) for name, packed in weights.items()},
            binder.bind,
            lambda: binder.unbind(weights),
        )

    def room(self) -> Scratch:
        """For the values of any one module; made when it is first asked for."""
        if self._scratch is None:
            first = next(weight for layer in self._packed for weight in layer.values())
            most, device = max(map(unpacked_values, self._layers)), first.parts["codes"].device
            self._scratch = Scratch(most, first.dtype, device)
        return self._scratch

    def packed(self, layer: int) -> Mapping[str, RoundedMatrix]:
        """Weights of a layer that are kept packed, by their names inside it."""
        return self._packed[layer]

    def release(self, layer: int) -> None:
        """Drop the packed weights of a layer: another has them."""
        for unpacker in self._unpackers[layer]:
            unpacker.remove()
        self._waiting = [unpacker for unpacker in self._waiting if unpacker not in self._unpackers[layer]]
        self._unpackers[layer], self._packed[layer] = [], {}

    def recover(self) -> None:
        """Nothing streams here."""

    def close(self) -> None:
        for layer in range(len(self._packed)):
            self.release(layer)
        self._waiting.clear()
        for binder in self._binders:
            binder.close()
        self._scratch = None
