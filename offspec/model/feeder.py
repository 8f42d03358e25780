"""Gives every layer its weights just before it runs: resident ones once, the others from the stream."""

from collections.abc import Callable, Iterable, Sequence

import torch

from offspec.memory import trim
from offspec.model.binding import Binder
from offspec.model.calibration import InputMoments
from offspec.model.packing import Packed, pack, unpack
from offspec.store.reader import DirectReader
from offspec.stream import DeviceStream, DiskStream, read_unit


class LayerFeeder:
    """Binds layer i on `enter(i)` and takes its weights away again on `leave(i)`.

    binders: one per layer; resident: indices kept in memory; slots: ring size for all others. On a CUDA
    device the resident layers and a second ring of `slots` live on the device.
    """

    def __init__(
        self,
        binders: list[Binder],
        resident: Iterable[int],
        slots: int,
        reader: DirectReader,
        device: torch.device,
    ) -> None:
        self._binders = binders
        self._resident = sorted(resident)
        self._reader = reader
        self._device = device
        streamed = [index for index in range(len(binders)) if index not in set(self._resident)]
        self._order = {layer: unit for unit, layer in enumerate(streamed)}
        self._stream: DiskStream | DeviceStream | None = None
        if streamed:
            layouts = [binders[layer].layout for layer in streamed]
            if device.type == "cpu":
                self._stream = DiskStream(layouts, slots, reader)
            else:
                self._stream = DeviceStream(DiskStream(layouts, slots, reader, pin=True), slots, device)

    @property
    def bytes_streamed(self) -> int:
        """Bytes read from disk for streamed layers so far, those read ahead included."""
        return self._stream.bytes_read if self._stream else 0

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read the resident layers; progress(bytes done, bytes in all) after each."""
        total = sum(self._binders[layer].layout.nbytes for layer in self._resident)
        done = 0
        for layer in self._resident:
            binder = self._binders[layer]
            # The parameters are views that keep this memory alive; where they are copies, it is freed.
            binder.bind(binder.realise(read_unit(binder.layout, self._reader).tensor.to(self._device)))
            done += binder.layout.nbytes
            progress(done, total)

    def enter(self, layer: int) -> None:
        """Have layer's weights in place. Raises StreamError, ClosedError."""
        unit = self._order.get(layer)
        if unit is None or self._stream is None:
            return
        memory = self._stream.acquire(unit)
        try:
            self._binders[layer].bind(self._binders[layer].realise(memory))
        except BaseException:
            self._stream.release()
            raise

    def leave(self, layer: int) -> None:
        if self._stream is not None and layer in self._order:
            self._binders[layer].unbind()
            self._stream.release()

    def recover(self) -> None:
        """After a pass was broken off: make the stream usable for the next."""
        if self._stream is not None:
            self._stream.abandon()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        for binder in self._binders:
            binder.unbind()


class PackedLayers:
    """Every layer kept in memory with its matrices rounded to 4 bits: the weights of a draft.

    The first pass, over a text to calibrate on, is what loads it: each layer is read, runs once as it is
    on disk while its inputs are measured, and is rounded as it is left. expand: keep the rounded values in
    the model's dtype, 16 bits each, which is faster by the cost of unpacking; else keep them packed and
    unpack a layer just before it runs.
    """

    bytes_streamed = 0

    def __init__(
        self,
        binders: list[Binder],
        layers: Sequence[torch.nn.Module],
        reader: DirectReader,
        expand: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self._binders, self._layers, self._reader, self._expand = binders, layers, reader, expand
        self._progress = progress
        self._packed: list[dict[str, Packed]] = []
        self._loading: tuple[dict[str, torch.Tensor], InputMoments] | None = None

    def enter(self, layer: int) -> None:
        binder = self._binders[layer]
        if layer == len(self._packed):
            tensors = binder.realise(read_unit(binder.layout, self._reader).tensor)
            binder.bind(tensors)
            self._loading = tensors, InputMoments(self._layers[layer])
        elif self._packed[layer]:
            binder.bind({name: unpack(packed) for name, packed in self._packed[layer].items()})

    def leave(self, layer: int) -> None:
        if self._loading is not None:
            self._round(layer, *self._loading)
            self._loading = None
        elif self._packed[layer]:
            self._binders[layer].unbind(self._packed[layer])

    def _round(self, layer: int, tensors: dict[str, torch.Tensor], moments: InputMoments) -> None:
        moments.close()
        binder, packed = self._binders[layer], dict[str, Packed]()
        for name, tensor in tensors.items():
            if tensor.dim() < 2:
                binder.bind({name: tensor.clone()})
                continue
            inner = name.removeprefix(binder.prefix)
            packed[name] = pack(tensor, moments.importance(inner, tensor))
            if self._expand:
                binder.bind({name: unpack(packed.pop(name))})
        binder.unbind(packed)
        self._packed.append(packed)
        trim()  # the scratch of rounding, layer by layer, would otherwise stay on the heap
        self._progress(layer + 1, len(self._binders))

    def recover(self) -> None:
        """Nothing streams here."""

    def close(self) -> None:
        for binder in self._binders:
            binder.unbind()
        self._packed.clear()
