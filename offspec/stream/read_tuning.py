"""Benchmark that chooses the number and size of concurrent reads for a disk."""

import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from offspec.core.errors import StreamError
from offspec.stream.arena import PAGE, Arena
from offspec.stream.direct_reader import DirectReader, ReadShape
from offspec.stream.layout import UnitLayout

# A deeper queue has a cost, because its threads compete with computing threads for the CPU. So shapes are in
# order of depth, and a deeper one is chosen only if it is clearly faster.
_SHAPES = (
    ReadShape(1, 4 << 20),
    ReadShape(2, 4 << 20),
    ReadShape(2, 16 << 20),
    ReadShape(4, 1 << 20),
    ReadShape(4, 4 << 20),
    ReadShape(8, 1 << 20),
)
_CLEARLY = 1.04
_SECONDS = 0.06  # reading time for each shape in each of the two rounds
_WORTH_IT = 1 << 30  # bytes per pass; below that, the shape hardly matters


def choose_read_shape(units: Sequence[UnitLayout], reader: DirectReader) -> ReadShape:
    """Return the shape that reads these units fastest, or the default if there is too little to read.

    Takes less than a second. Each shape is measured twice, in alternating order because a disk's speed
    drifts; the better result counts.
    """
    block = max(shape.block for shape in _SHAPES)
    blocks = [
        (extent.file, at)
        for unit in units
        for extent in unit.extents
        for at in range(extent.offset, extent.offset + extent.needed - block + 1, block)
    ]
    if len(blocks) * block < _WORTH_IT:
        return ReadShape()
    rates = dict.fromkeys(_SHAPES, 0.0)
    ticket = count()
    for shape in (*_SHAPES, *reversed(_SHAPES)):
        rates[shape] = max(rates[shape], _rate(shape, blocks, block, reader, ticket))
    best = _SHAPES[0]
    for shape in _SHAPES[1:]:
        if rates[shape] > rates[best] * _CLEARLY:
            best = shape
    return best


def _rate(
    shape: ReadShape,
    blocks: Sequence[tuple[Path, int]],
    block: int,
    reader: DirectReader,
    ticket: "count[int]",
) -> float:
    """Measure bytes per second over `_SECONDS`, continuing after the blocks of the previous measurement."""
    arenas = [Arena(shape.block) for _ in range(shape.depth)]
    pieces = block // shape.block
    moved = [0] * shape.depth
    began = time.perf_counter()

    def read(worker: int) -> None:
        while time.perf_counter() - began < _SECONDS:
            turn = next(ticket)
            path, at = blocks[turn // pieces % len(blocks)]
            try:
                moved[worker] += reader.read_into(
                    path, at + turn % pieces * shape.block, arenas[worker].buffer, PAGE
                )
            except StreamError:
                return  # an unreadable file is reported when it is needed

    threads = [threading.Thread(target=read, args=(worker,)) for worker in range(shape.depth)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        for thread in threads:  # also after Ctrl-C: the files will be closed
            thread.join()
    return sum(moved) / (time.perf_counter() - began)
