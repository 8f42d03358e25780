"""Where the tensors of one unit (a decoder layer, say) lie in its files, and where they land in a slot."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offspec.checkpoint.tensors import TensorInfo
from offspec.stream.arena import PAGE, round_up

GAP = 256 << 10  # reading across a gap this small is cheaper than a second read


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
class UnitLayout:
    """One unit of streaming: its extents, and the slot offset of each of its tensors."""

    name: str
    extents: tuple[Extent, ...]
    places: dict[str, tuple[int, TensorInfo]]

    @property
    def nbytes(self) -> int:
        """Bytes of slot that the unit takes, which are also the bytes read from disk."""
        return sum(extent.length for extent in self.extents)


def lay_out(name: str, tensors: Iterable[TensorInfo]) -> UnitLayout:
    """Coalesce neighbouring tensors into aligned extents, one after the other in the slot."""
    extents: list[Extent] = []
    places: dict[str, tuple[int, TensorInfo]] = {}
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
    return UnitLayout(name, tuple(extents), places)
