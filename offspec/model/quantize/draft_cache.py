"""Cache of quantized drafts, so that the next start need not quantize again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.safetensors_writer import Entry, SafetensorsWriter
from offspec.checkpoint.tensors import dtype_name, nbytes_of
from offspec.core.cache_dir import QUANTIZED, cache_folder, cache_root, make_folder, remove_folder
from offspec.core.errors import CheckpointError, DiskFullError, OffspecError
from offspec.core.events import Event, Notice
from offspec.core.files import require_space
from offspec.model.quantize.quantized_matrix import QuantizedMatrix, is_quantizable, quantized_parts
from offspec.model.unpacking import view_in
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.layout import lay_out
from offspec_planners.units import format_bytes

LEAST = 16 << 20  # bytes of quantized layers; less is quantized in about a second
_VERSION = 1  # increase it if the same weights would be quantized to other values

Parameters = Mapping[str, torch.Tensor]  # without values


# Weights by name: quantized matrices, and other tensors unchanged.
QuantizedWeights = dict[str, torch.Tensor | QuantizedMatrix]


class QuantizedDraftCache:
    """All quantized layers of a draft in a folder of the cache, one file per layer, written all or none.

    Args:
        name: Name of the model, for the folder's name.
        fingerprint: Fingerprint of the model's weights.
        bits: 2, 3 or 4.
        layers: Parameters of each layer.
        depends: Anything else that affects the values: calibration text, dtype, device.
        notify: Receives a Notice when the draft is cached, or if it cannot be.
    """

    def __init__(
        self,
        name: str,
        fingerprint: str,
        bits: int,
        layers: list[Parameters],
        depends: object,
        notify: Callable[[Event], None],
    ) -> None:
        seen = json.dumps((_VERSION, fingerprint, bits, depends), default=str).encode()
        key = f"{bits}bit-{hashlib.sha256(seen).hexdigest()[:16]}"
        self.folder = cache_folder(cache_root() / QUANTIZED, Path(name).stem, key)
        self._bits, self._layers, self._notify = bits, layers, notify
        self._partial: Path | None = None
        self._failure: OffspecError | OSError | None = None

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(nbytes_of(dtype, shape) for of in self._layers for _, dtype, shape in self._entries(of))

    def is_complete(self) -> bool:
        """Return whether all layers are in the cache; remove a damaged cache folder."""
        if not self.folder.exists():
            return False
        try:
            whole = all(
                {
                    (info.name, info.dtype, info.shape)
                    for info in read_header(self.folder / _name(layer))[0].values()
                }
                == set(self._entries(parameters))
                for layer, parameters in enumerate(self._layers)
            )
        except CheckpointError:
            whole = False
        if not whole:
            with suppress(OSError):  # may belong to another user
                remove_folder(self.folder)
        return whole

    def make(self, quantize_all: Callable[[], None]) -> bool:
        """Call `quantize_all`, which must call `add` for each layer; return whether it was called.

        It is not called if another process has filled the cache in the meantime. If the cache cannot be
        written, a Notice reports it. Raises the errors of `quantize_all`.
        """
        done = failed = False

        def fill(partial: Path) -> None:
            nonlocal done, failed
            try:
                require_space(self.folder.parent, self.nbytes, "caching the quantized draft")
                self._partial = partial
            except DiskFullError as error:
                self._failure = error
            failed = True
            quantize_all()
            done, failed = True, False
            if self._failure is not None:
                raise self._failure

        def waiting() -> None:
            self._notify(Notice("waiting for another process that is quantizing this draft"))

        try:
            make_folder(self.folder, fill, waiting)
        except (OffspecError, OSError) as error:
            if failed:
                raise
            reason = f"the quantized draft could not be cached, so the next start quantizes it again: {error}"
            self._notify(Notice(reason))
        else:
            if done:
                size = format_bytes(self.nbytes)
                self._notify(Notice(f"the {self._bits}-bit draft was cached in {self.folder} ({size})"))
            elif self.is_complete():
                return False
        finally:
            self._partial = None
        if not done:
            quantize_all()
        return True

    def add(self, layer: int, found: QuantizedWeights) -> None:
        """Write a layer while `make` runs. After an error no more layers are written."""
        if self._partial is None or self._failure is not None:
            return
        tensors = dict[str, torch.Tensor]()
        for name, weight in found.items():
            if isinstance(weight, QuantizedMatrix):
                tensors |= {f"{name}.{part}": tensor for part, tensor in weight.parts.items()}
            else:
                tensors[name] = weight
        try:
            with SafetensorsWriter(self._partial / _name(layer), self._entries(self._layers[layer])) as out:
                for name, _, _ in self._entries(self._layers[layer]):
                    out.write(name, tensors[name])
        except (OffspecError, OSError) as error:
            self._failure = error

    def read(self, layer: int, device: torch.device) -> QuantizedWeights:
        """Read a layer from the cache. Raises StreamError."""
        infos, _ = read_header(self.folder / _name(layer))
        layout, reader = lay_out(_name(layer), infos.values()), DirectReader()
        try:
            memory = layout.copy_to_device(read_unit(layout, reader).tensor, device)
        finally:
            reader.close()
        # Copied, because a view of a norm would keep the whole layer in memory.
        tensors = {name: view_in(memory, layout, infos[name]).clone() for name in infos}
        found = QuantizedWeights()
        for name, parameter in self._layers[layer].items():
            if is_quantizable(name, shape := parameter.shape):
                parts = {part: tensors[f"{name}.{part}"] for part in quantized_parts(shape, self._bits)}
                found[name] = QuantizedMatrix(self._bits, parts, shape, parameter.dtype)
            else:
                found[name] = tensors[name]
        return found

    def _entries(self, layer: Parameters) -> list[Entry]:
        """Return the tensors of a layer's file."""
        entries = list[Entry]()
        for name, parameter in layer.items():
            if is_quantizable(name, parameter.shape):
                parts = quantized_parts(parameter.shape, self._bits)
                entries += [
                    (f"{name}.{part}", dtype_name(of.dtype), tuple(of.shape)) for part, of in parts.items()
                ]
            else:
                entries.append((name, dtype_name(parameter.dtype), tuple(parameter.shape)))
        return entries


def _name(layer: int) -> str:
    return f"layer-{layer:04}.safetensors"
