"""Texts stored by lookups: intact after Ctrl-C at any line, and never longer than the limit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import FrameType

import pytest

from offspec.draft.lookup import ngram as lookup
from offspec.draft.lookup import suffix
from offspec.draft.lookup import suffix_automaton as automaton
from offspec.draft.lookup.ngram import NgramLookup
from offspec.draft.lookup.suffix import SuffixLookup

Party = SuffixLookup | NgramLookup
Step = tuple[str, int | list[int]]
Said = list[dict[tuple[int, ...], float]]

MODULES = {module.__file__ for module in (automaton, lookup, suffix)}
SPEECH = [0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 4, 4, 0, 1, 2]
SIDEWAYS: list[Step] = [("start", [*SPEECH, 3, 0]), ("rewind", 16)]
LIMIT = 80  # of the suffix lookup
STEPS: list[Step] = [
    ("add_text", [1, 2, 4, 1, 2, 4, 3]),
    ("start", SPEECH),
    *SIDEWAYS * 4,  # beyond the limit
    ("start", [*SPEECH, 3, 1, 2]),
    ("add_text", [3, 1, 2, 0, 2, 0]),
    ("rewind", 5),
    ("start", [*SPEECH[:5], *range(10, 70), 3, 0, 1]),
    ("rewind", 9),  # to ids that are no longer searched
    ("start", [*SPEECH[:5], *range(10, 14), 0, 1]),
]


def take(party: Party, step: Step) -> None:
    name, value = step
    if name != "add_text" or isinstance(party, SuffixLookup):
        getattr(party, name)(value)


def fed(party: Party, steps: Sequence[Step]) -> Party:
    for step in steps:
        take(party, step)
    return party


def drafted_paths(party: Party) -> Said:
    """Return the drafted continuations of some paths, and the log-probability of the last token."""
    found: Said = []
    for path in ([], [2], [4], [0, 1]):
        subtree = party.continuations(path, None, 200, math.log(0.01), 3)
        ways: list[tuple[int, ...]] = []
        for parent, token in zip(subtree.parent, subtree.token, strict=True):
            ways.append((*(ways[parent] if parent >= 0 else ()), token))
        found.append(dict(zip(ways, subtree.log_prob, strict=True)))
    return found


def interrupted(call: Callable[[], None], line: int) -> bool:
    """Return whether that line exists, counted in order of execution: Ctrl-C comes before it."""

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal line
        if frame.f_code.co_filename not in MODULES:
            return None
        line -= event == "line"
        if line < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("made", [lambda: SuffixLookup(LIMIT), NgramLookup], ids=["suffix", "lookup"])
def test_ctrl_c_at_any_line_leaves_texts_before_or_after_the_step(
    made: Callable[[], Party],
) -> None:
    whole = [drafted_paths(fed(made(), STEPS[:taken])) for taken in range(len(STEPS) + 1)]
    for done, step in enumerate(STEPS):
        before, after = whole[done : done + 2]
        for line in count(done % 7, 7):
            party = fed(made(), STEPS[:done])
            if not interrupted(partial(take, party, step), line):
                break
            if step[0] == "add_text" or line % 2:  # else the next step is the same again
                now = drafted_paths(party)
                assert now in (before, after), (step, line)
                if now == after:
                    continue
            take(party, step)
            assert drafted_paths(party) == after, (step, line)


def test_rebuilt_texts_count_as_before() -> None:
    steps: list[Step] = [("add_text", [*range(1000, 1300)]), ("start", SPEECH), *SIDEWAYS * 7]
    assert (
        drafted_paths(fed(SuffixLookup(400), steps)) == drafted_paths(fed(SuffixLookup(), steps)) != [{}] * 4
    )
    ids = [*range(100, 112)]
    cut = fed(SuffixLookup(32), [("add_text", [*range(5)]), ("start", [*ids, 7, 8, 7, 8]), ("rewind", 12)])
    new = fed(SuffixLookup(), [("add_text", [7, 8, 7, 8])])
    for party in (cut, new):
        party.start([*ids, 7])
    assert drafted_paths(cut) == drafted_paths(new) != [{}] * 4


def test_rewinds_never_exceed_the_limit() -> None:
    lookup = SuffixLookup(limit=300)
    ids = [*range(500)]
    for length in (*range(499, 300, -1), *[310] * 50, *range(309, 100, -1)):
        lookup.start(ids[: length + 1])
        lookup.rewind(length)
        assert sum(len(passage.ids) for passage in lookup._held.past) <= 300
        assert lookup._tokens == lookup._held.tokens <= 300
