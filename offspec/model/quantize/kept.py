"""A rounded draft in the cache, so that the next start reads it instead of rounding again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import bytes_of, dtype_name
from offspec.checkpoint.write import Entry, SafetensorsWriter
from offspec.core.cache_dir import ROUNDED, cache_root, folder_of, make_folder, remove_folder
from offspec.core.errors import CheckpointError, DiskFullError, OffspecError
from offspec.core.events import Event, Notice
from offspec.core.files import require_space
from offspec.model.quantize.rounding import RoundedMatrix, packed_parts, packs
from offspec.model.unpacking import view_in
from offspec.stream.direct_reader import DirectReader
from offspec.stream.disk_stream import read_unit
from offspec.stream.layout import lay_out
from offspec_planners.units import format_bytes

LEAST = 16 << 20  # bytes of rounded layers; fewer are rounded in about a second
_VERSION = 1  # raise it where the same weights would be rounded to other values

Parameters = Mapping[str, torch.Tensor]  # without values


RoundedLayer = dict[
    str, torch.Tensor | RoundedMatrix
]  # weights by name: rounded matrices, others as they are


class KeptRounding:
    """All layers of a draft, rounded, in a folder of the cache: a file for each, and all of them or none.

    Args:
        name: Of the model, for people.
        fingerprint: Of its weights.
        bits: 2, 3 or 4.
        layers: The parameters of each layer.
        depends: What else decides on the values: text, number format, device.
        notify: Takes a Notice where the rounding is kept, and where it cannot be.
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
        self.folder = folder_of(cache_root() / ROUNDED, Path(name).stem, key)
        self._bits, self._layers, self._notify = bits, layers, notify
        self._partial: Path | None = None
        self._failure: OffspecError | OSError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(bytes_of(dtype, shape) for of in self._layers for _, dtype, shape in self._entries(of))

    def is_there(self) -> bool:
        """Whether all layers are in the cache; what is damaged there is removed."""
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
            with suppress(OSError):  # it is another user's
                remove_folder(self.folder)
        return whole

    def make(self, round_all: Callable[[], None]) -> bool:
        """Call `round_all`, which calls `add` for each layer; False where another process did it meanwhile.

        A cache that cannot be written is told in a Notice. Raises what `round_all` raises.
        """
        done = failed = False

        def fill(partial: Path) -> None:
            nonlocal done, failed
            try:
                require_space(self.folder.parent, self.nbytes, "keeping the rounded draft")
                self._partial = partial
            except DiskFullError as error:
                self._failure = error
            failed = True
            round_all()
            done, failed = True, False
            if self._failure is not None:
                raise self._failure

        def waiting() -> None:
            self._notify(Notice("another process is rounding this draft: waiting for it"))

        try:
            make_folder(self.folder, fill, waiting)
        except (OffspecError, OSError) as error:
            if failed:
                raise
            self._notify(Notice(f"the rounded draft is not kept, so the next start rounds it again: {error}"))
        else:
            if done:
                size = format_bytes(self.nbytes)
                self._notify(Notice(f"the draft in {self._bits} bits is kept in {self.folder} ({size})"))
            elif self.is_there():
                return False
        finally:
            self._partial = None
        if not done:
            round_all()
        return True

    def add(self, layer: int, found: RoundedLayer) -> None:
        """Write a layer while `make` runs; where that fails, the layers after it are not written."""
        if self._partial is None or self._failure is not None:
            return
        tensors = dict[str, torch.Tensor]()
        for name, weight in found.items():
            if isinstance(weight, RoundedMatrix):
                tensors |= {f"{name}.{part}": tensor for part, tensor in weight.parts.items()}
            else:
                tensors[name] = weight
        try:
            with SafetensorsWriter(self._partial / _name(layer), self._entries(self._layers[layer])) as out:
                for name, _, _ in self._entries(self._layers[layer]):
                    out.write(name, tensors[name])
        except (OffspecError, OSError) as error:
            self._failure = error

    def read(self, layer: int, device: torch.device) -> RoundedLayer:
        """A layer that is there. Raises StreamError."""
        infos, _ = read_header(self.folder / _name(layer))
        layout, reader = lay_out(_name(layer), infos.values()), DirectReader()
        try:
            memory = layout.put_on(read_unit(layout, reader).tensor, device)
        finally:
            reader.close()
        # Copies: a view of a norm would keep all else in memory.
        tensors = {name: view_in(memory, layout, infos[name]).clone() for name in infos}
        found = RoundedLayer()
        for name, parameter in self._layers[layer].items():
            if packs(name, shape := parameter.shape):
                parts = {part: tensors[f"{name}.{part}"] for part in packed_parts(shape, self._bits)}
                found[name] = RoundedMatrix(self._bits, parts, shape, parameter.dtype)
            else:
                found[name] = tensors[name]
        return found

    def _entries(self, layer: Parameters) -> list[Entry]:
        """The tensors of a layer's file."""
        entries = list[Entry]()
        for name, parameter in layer.items():
            if packs(name, parameter.shape):
                parts = packed_parts(parameter.shape, self._bits)
                entries += [
                    (f"{name}.{part}", dtype_name(of.dtype), tuple(of.shape)) for part, of in parts.items()
                ]
            else:
                entries.append((name, dtype_name(parameter.dtype), tuple(parameter.shape)))
        return entries


def _name(layer: int) -> str:
    return f"layer-{layer:04}.safetensors"
