"""Resident layers of a draft with quantized matrices."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from offspec.core.memory import malloc_trim
from offspec.model.binding import Binder
from offspec.model.quantize.calibration import InputMoments
from offspec.model.quantize.draft_cache import QuantizedDraftCache, QuantizedWeights
from offspec.model.quantize.quantized_matrix import (
    QuantizedMatrix,
    dequantize_matrix,
    is_quantizable,
    quantize_matrix,
    quantized_bytes,
)
from offspec.model.unpacking import ModuleUnpacker, Scratch
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.workers import BytesMoved, RingStats


def quantized_layer_bytes(layer: torch.nn.Module, bits: int) -> int:
    """Return the bytes of a layer's weights with all quantizable ones quantized."""
    return sum(
        quantized_bytes(w.shape, bits) if is_quantizable(name, w.shape) else w.nbytes
        for name, w in layer.named_parameters()
    )


def unpacked_values(layer: torch.nn.Module) -> int:
    """Return the number of quantized values in the largest module, all of which are unpacked at once."""
    values = Counter[str]()
    for name, weight in layer.named_parameters():
        values[name.rpartition(".")[0]] += weight.numel() if is_quantizable(name, weight.shape) else 0
    return max(values.values())


class QuantizedLayers:
    """Layers of a draft, all in memory, with matrices quantized to `bits`.

    The first pass, over a calibration text, loads the layers: each is read, runs once unquantized while its
    inputs are measured, and is then quantized. Weights that cannot be quantized are not changed; see
    `is_quantizable`.

    Args:
        binders: One per layer.
        layers: Decoder layers.
        reader: Reader of the weight files.
        bits: 2, 3 or 4.
        expand: Whether to keep quantized values in the model's dtype, 16 bits each, which saves the time of
            unpacking. Otherwise they stay packed, and each module is unpacked just before it runs.
        progress: Called with layers done and total layers.
        kept: Cache to which quantized layers are written for the next start.
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
        kept: QuantizedDraftCache | None = None,
    ) -> None:
        self._binders, self._layers, self._reader = binders, layers, reader
        self._bits, self._expand, self._progress = bits, expand, progress
        self._kept = kept
        self._loading: tuple[dict[str, torch.Tensor], InputMoments] | None = None
        self._packed: list[dict[str, QuantizedMatrix]] = []
        self._unpackers: list[list[ModuleUnpacker]] = []
        self._waiting: list[ModuleUnpacker] = []  # not installed yet
        self._scratch: Scratch | None = None

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers whose weights are always in memory: all loaded layers."""
        return tuple(range(len(self._packed)))

    def enter(self, layer: int) -> None:
        if layer == 0 and self._packed:
            if self._scratch is not None:
                self._scratch.taken = 0  # Ctrl-C may have interrupted the previous pass
            for unpacker in self._waiting:
                unpacker.install(self.room())
            self._waiting.clear()
        if layer == len(self._packed):
            binder = self._binders[layer]
            tensors = binder.materialize(read_unit(binder.layout, self._reader).tensor)
            binder.bind(tensors)
            self._loading = tensors, InputMoments(self._layers[layer])

    def leave(self, layer: int) -> None:
        if self._loading is not None:
            self._quantize(layer, *self._loading)
            self._loading = None

    def _quantize(self, layer: int, tensors: dict[str, torch.Tensor], moments: InputMoments) -> None:
        moments.close()
        binder, found = self._binders[layer], QuantizedWeights()
        for name, tensor in tensors.items():
            if is_quantizable(name, tensor.shape):
                importance = moments.importance(name.removeprefix(binder.prefix), tensor)
                found[name] = quantize_matrix(tensor, self._bits, importance)
            else:
                found[name] = tensor.clone()  # frees the memory that it is a view of
        binder.unbind()
        tensors.clear()
        if self._kept is not None:
            self._kept.add(layer, found)
        self._take(layer, found)

    def load_kept(self, kept: QuantizedDraftCache) -> None:
        """Load all layers from the cache. Raises StreamError."""
        for layer, binder in enumerate(self._binders):
            self._take(layer, kept.read(layer, binder.device))

    def _take(self, layer: int, found: QuantizedWeights) -> None:
        """Install the quantized weights of a layer."""
        binder = self._binders[layer]
        packed, by_module = dict[str, QuantizedMatrix](), dict[str, dict[str, QuantizedMatrix]]()
        for name, weight in found.items():
            if isinstance(weight, torch.Tensor) or self._expand:
                binder.bind({name: weight if isinstance(weight, torch.Tensor) else dequantize_matrix(weight)})
                continue
            inner = name.removeprefix(binder.prefix)
            packed[inner] = weight
            by_module.setdefault(inner.rpartition(".")[0], {})[name] = weight
        self._packed.append(packed)
        self._unpackers.append([self._unpacker(layer, *of) for of in by_module.items()])
        self._waiting += self._unpackers[-1]
        malloc_trim()  # otherwise the temporary memory of quantization would stay on the heap
        self._progress(layer + 1, len(self._binders))

    def _unpacker(self, layer: int, module: str, weights: dict[str, QuantizedMatrix]) -> ModuleUnpacker:
        """Return an unpacker for the weights of one module."""
        binder, sizes = self._binders[layer], {name: of.shape.numel() for name, of in weights.items()}
        binder.unbind(weights)
        return ModuleUnpacker(
            self._layers[layer].get_submodule(module),
            sum(sizes.values()),
            lambda out: {
                name: dequantize_matrix(packed, out(sizes[name])) for name, packed in weights.items()
            },
            binder.bind,
            lambda: binder.unbind(weights),
        )

    def room(self) -> Scratch:
        """Return the workspace for the values of one module, created on first use."""
        if self._scratch is None:
            first = next(weight for layer in self._packed for weight in layer.values())
            most, device = max(map(unpacked_values, self._layers)), first.parts["codes"].device
            self._scratch = Scratch(most, first.dtype, device)
        return self._scratch

    def packed(self, layer: int) -> Mapping[str, QuantizedMatrix]:
        """Return the packed weights of a layer by their names within it."""
        return self._packed[layer]

    def release(self, layer: int) -> None:
        """Drop the packed weights of a layer that another model has taken over."""
        for unpacker in self._unpackers[layer]:
            unpacker.remove()
        self._waiting = [unpacker for unpacker in self._waiting if unpacker not in self._unpackers[layer]]
        self._unpackers[layer], self._packed[layer] = [], {}

    def recover(self) -> None:
        """Do nothing, as no weights are streamed."""

    def close(self) -> None:
        for layer in range(len(self._packed)):
            self.release(layer)
        self._waiting.clear()
        for binder in self._binders:
            binder.close()
        self._scratch = None
