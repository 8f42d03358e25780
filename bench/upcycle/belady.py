"""The most hits that any order of eviction could have: Belady's, which knows what will be asked for.

L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (1966).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

_NEVER = 1 << 60
# Minus the next call that has a unit, the call after it, and the unit: the least leaves first.
Key = tuple[int, int, int]


def most_hits(calls: Sequence[Sequence[int]], slots: int, kept: Iterable[int] = ()) -> int:
    """How many of the units asked for can be in a slot already, where each that is not must be put into one.

    The unit that leaves is the one whose next call is last. Exact where every call has fewer units than there
    are slots; elsewhere a hit may be left out.

    Args:
        calls: The units of each call, all different.
        slots: How many units are kept.
        kept: Those in slots before the first call.
    """
    following = _following(calls)
    keys = {unit: _key(following, -1, unit) for unit in kept}  # of the units in slots
    heap = list(keys.values())
    heapify(heap)
    hits = 0
    for number, units in enumerate(calls):
        hits += sum(unit in keys for unit in units)
        pairs = [(unit not in keys, _key(following, number, unit)) for unit in units]
        for missed, key in sorted(pairs):  # those that are asked for again soon come last
            if missed and len(keys) >= slots:
                _evict(keys, heap)
            keys[key[2]] = key
            heappush(heap, key)
    return hits


def _key(following: dict[tuple[int, int], int], number: int, unit: int) -> Key:
    call = following.get((number, unit), _NEVER)
    return -call, following.get((call, unit), _NEVER), unit


def _following(calls: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """By call and unit, the next call that has it too; call -1 is before all."""
    last: dict[int, int] = {}
    found = {}
    for number, units in enumerate(calls):
        for unit in units:
            found[last.get(unit, -1), unit] = number
            last[unit] = number
    return found


def _evict(keys: dict[int, Key], heap: list[Key]) -> None:
    while True:
        key = heappop(heap)
        if keys.get(key[2]) == key:  # else it was asked for since, or has left
            del keys[key[2]]
            return
