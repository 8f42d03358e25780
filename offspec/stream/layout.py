"""Where the tensors of one unit (a decoder layer, say) lie in its files, and where they land in a slot.

O_DIRECT leaves a tensor where its file has it within a page, and the length of a safetensors header decides
that: at a multiple of 8. Kernels and libraries load 16 bytes at once where they can, so what is copied to a
device is aligned there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offspec.checkpoint.tensors import TensorInfo
from offspec.core.errors import StreamError
from offspec.stream.arena import PAGE, round_up

GAP = 256 << 10  # reading across a gap this small is cheaper than a second read
ALIGNMENT = 16  # bytes of the address of a tensor on a device

Places = dict[str, tuple[int, TensorInfo]]  # by name, the offset in a slot


@dataclass(frozen=True, slots=True)
class Extent:
    """An aligned range of a file, read in one go. `start` is its place in the slot, all in bytes.

    length is a multiple of the page size; the last `length - needed` bytes are padding.
    """

    file: Path
    offset: int
    length: int
    needed: int
    start: int


@dataclass(frozen=True, slots=True)
class Move:
    """`length` bytes of a slot in RAM that go to a slot on a device, from offset `source` to `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit of streaming: its extents, and the slot offset of each of its tensors.

    moves: what is copied to a device with memory of its own; aligned: the offsets of the tensors there.
    """

    name: str
    extents: tuple[Extent, ...]
    places: Places
    moves: tuple[Move, ...]
    aligned: Places

    @property
    def nbytes(self) -> int:
        """Bytes of slot that the unit takes, which are also the bytes read from disk."""
        return sum(extent.length for extent in self.extents)

    def nbytes_on(self, device: torch.device) -> int:
        """Bytes that the unit takes in a slot of a device."""
        if device.type == "cpu":
            return self.nbytes
        return max((move.target + move.length for move in self.moves), default=0)

    def places_on(self, device: torch.device) -> Places:
        """Where the tensors are in memory of a device that holds the unit."""
        return self.places if device.type == "cpu" else self.aligned

    def moves_to(self, device: torch.device) -> tuple[Move, ...]:
        """What to copy where."""
        return (Move(0, 0, self.nbytes),) if device.type == "cpu" else self.moves

    def error(self, message: str) -> StreamError:
        """What went wrong with the unit, in one line, with its first place on disk."""
        first = self.extents[0]
        return StreamError(" ".join(message.split()), file=first.file, offset=first.offset)

    def moved(self, places: Places) -> "UnitLayout":
        """The same with tensors elsewhere in the slot, between reading and a copy to a device."""
        moves, aligned = _align(places)
        return replace(self, places=places, moves=moves, aligned=aligned)

    def put_on(self, memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory of a device that holds the unit: `memory` itself, uint8 [slot bytes] in RAM, for a CPU."""
        if device.type == "cpu":
            return memory
        copy = torch.empty(self.nbytes_on(device), dtype=torch.uint8, device=device)
        for move in self.moves:
            copy[move.target :][: move.length].copy_(memory[move.source :][: move.length])
        return copy


def lay_out(name: str, tensors: Iterable[TensorInfo]) -> UnitLayout:
    """Coalesce neighbouring tensors into aligned extents, one after the other in the slot."""
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
    """Neighbours go in one move while that leaves all of them aligned."""
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
