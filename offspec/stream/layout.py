"""Positions of a unit's tensors (a unit is, for example, a decoder layer) in its files and in a slot.

O_DIRECT keeps each tensor at its offset within a page. That offset depends on the length of the safetensors
header and is a multiple of 8. Kernels and libraries load 16 bytes at once if they can, so tensors are aligned
when they are copied to a device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offspec.checkpoint.tensors import TensorInfo
from offspec.core.errors import StreamError
from offspec.stream.arena import PAGE, round_up

GAP = 256 << 10  # bytes; reading across a smaller gap is cheaper than a second read
ALIGNMENT = 16  # bytes; alignment of tensors on a device

Places = dict[str, tuple[int, TensorInfo]]  # offset in a slot and tensor, by name


@dataclass(frozen=True, slots=True)
class Extent:
    """Aligned range of a file that is read at once. `start` is its offset in the slot; all values in bytes.

    length is a multiple of the page size; the last `length - needed` bytes are padding.
    """

    file: Path
    offset: int
    length: int
    needed: int
    start: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of `length` bytes from offset `source` of a RAM slot to offset `target` of a device slot."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Streaming unit: its extents, and the slot offset of each of its tensors.

    moves: copies to a device with its own memory. aligned: offsets of the tensors there.
    """

    name: str
    extents: tuple[Extent, ...]
    places: Places
    moves: tuple[Move, ...]
    aligned: Places

    @property
    def nbytes(self) -> int:
        """Bytes of the unit in a slot, which are also the bytes read from disk."""
        return sum(extent.length for extent in self.extents)

    def nbytes_on(self, device: torch.device) -> int:
        """Return the bytes of the unit in a slot of a device."""
        if device.type == "cpu":
            return self.nbytes
        return max((move.target + move.length for move in self.moves), default=0)

    def places_on(self, device: torch.device) -> Places:
        """Return the positions of the tensors in a slot of a device."""
        return self.places if device.type == "cpu" else self.aligned

    def moves_to(self, device: torch.device) -> tuple[Move, ...]:
        """Return the copies from a RAM slot to a slot of a device."""
        return (Move(0, 0, self.nbytes),) if device.type == "cpu" else self.moves

    def error(self, message: str) -> StreamError:
        """Return a one-line error about the unit, with its first position on disk."""
        first = self.extents[0]
        return StreamError(" ".join(message.split()), file=first.file, offset=first.offset)

    def moved(self, places: Places) -> "UnitLayout":
        """Return this layout with other tensor positions, for units rearranged before a copy to a device."""
        moves, aligned = _align(places)
        return replace(self, places=places, moves=moves, aligned=aligned)

    def copy_to_device(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the unit in memory of a device; for a CPU `memory` itself, uint8 [slot bytes] in RAM."""
        if device.type == "cpu":
            return memory
        copy = torch.empty(self.nbytes_on(device), dtype=torch.uint8, device=device)
        for move in self.moves:
            copy[move.target :][: move.length].copy_(memory[move.source :][: move.length])
        return copy


def lay_out(name: str, tensors: Iterable[TensorInfo]) -> UnitLayout:
    """Coalesce neighbouring tensors into aligned extents that are consecutive in the slot."""
    extents: list[Extent] = []
    places: Places = {}
    run: list[TensorInfo] = []
    start = 0

    def flush() -> None:
        nonlocal start
        if not run:
            return
        begin = run[0].offset // PAGE * PAGE
        end = max(info.offset + info.nbytes for info in run)
        for info in run:
            places[info.name] = (start + info.offset - begin, info)
        extents.append(Extent(run[0].file, begin, round_up(end - begin), end - begin, start))
        start += round_up(end - begin)
        run.clear()

    for info in sorted(tensors, key=lambda info: (str(info.file), info.offset)):
        if run and (info.file != run[-1].file or info.offset - (run[-1].offset + run[-1].nbytes) > GAP):
            flush()
        run.append(info)
    flush()
    return UnitLayout(name, tuple(extents), places, *_align(places))


def _align(places: Places) -> tuple[tuple[Move, ...], Places]:
    """Combine neighbouring tensors into one move as long as all of them stay aligned."""
    moves: list[Move] = []
    aligned: Places = {}
    for place, info in sorted(places.values(), key=lambda found: found[0]):
        last = moves[-1] if moves else Move(-PAGE, 0, 0)
        target = place - last.source + last.target
        ended = last.source + last.length
        if target % ALIGNMENT or place - ended >= PAGE:
            target = round_up(last.target + last.length, ALIGNMENT)
            moves.append(Move(place, target, info.nbytes))
        else:
            moves[-1] = Move(last.source, last.target, max(ended, place + info.nbytes) - last.source)
        aligned[info.name] = target, info
    return tuple(moves), aligned
