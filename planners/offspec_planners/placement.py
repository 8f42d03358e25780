"""Which layers stay in memory and how many slots the others stream through."""

from collections.abc import Sequence
from dataclasses import dataclass


class TooSmallError(ValueError):
    """The budget cannot hold even the smallest arrangement. `needed` bytes would do."""

    def __init__(self, needed: int, given: int) -> None:
        super().__init__(f"{needed} bytes are needed, {given} were given")
        self.needed, self.given = needed, given


@dataclass(frozen=True, slots=True)
class Placement:
    """resident: indices of layers kept in memory; slots: ring size for the rest (0 when none stream)."""

    resident: tuple[int, ...]
    slots: int


def place_layers(layers: Sequence[int], extra: Sequence[int], memory: int, *, slots: int = 3) -> Placement:
    """Place layers of `layers[i]` bytes, each taking `extra[i]` more while it runs, into `memory` bytes.

    `extra` is what converting a layer allocates: once for a streamed layer at a time, for ever for a
    resident one in place of its slot. The ring has `slots` slots where there is room, at least 2; what
    memory is left keeps layers resident, spread evenly so that the link has time to fill between them.
    Raises TooSmallError.
    """
    count = len(layers)
    whole = sum(size + grown for size, grown in zip(layers, extra, strict=True))
    if whole <= memory:
        return Placement(tuple(range(count)), 0)
    widest, scratch = max(layers), max(extra)
    smallest = 2 * widest + scratch
    if smallest > memory:
        raise TooSmallError(min(smallest, whole), memory)
    ring = next(n for n in range(max(slots, 2), 1, -1) if n * widest + scratch <= memory)
    room = memory - ring * widest - scratch
    per_layer = max(size + grown for size, grown in zip(layers, extra, strict=True))
    fitting = min(room // per_layer, count - ring) if count > ring else 0
    resident = sorted({round((i + 0.5) * count / fitting - 0.5) for i in range(fitting)}) if fitting else []
    return Placement(tuple(resident), min(ring, count - len(resident)))
