"""What `--draft auto` comes to: the best draft there is for a target, and in one line why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.core.config import LOOKUPS, SUBSTITUTE
from offspec.draft.published import KnownDraft

_MIXED = LOOKUPS[0]  # what every draft is mixed with: it costs next to nothing
# Of the target's weights, and of its stored bytes: a larger model takes too long to draft.
_SMALL, _SMALL_BYTES = 1 / 6, 0.3


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The draft sources that "auto" stands for.

    Args:
        names: Of the sources.
        line: A notice for the user; "" where there is nothing to explain.
    """

    names: tuple[str, ...]
    line: str = ""


def choose_draft(
    known: Sequence[KnownDraft],
    is_here: Callable[[str], bool],
    obstacle: Callable[[str], str | None],
    *,
    fetches: bool,
    bits: float = 16,
) -> DraftChoice:
    """The first that can be used.

    In this order: a trained head that was fetched before; a model of the target's family, several times
    smaller; a substitute; a head to be fetched, or else the smallest model.

    Args:
        known: Published drafts for the target, the best kind first.
        is_here: Whether a hub id need not be fetched.
        obstacle: Opens a draft, and says in a clause why it cannot be used; None where it can.
        fetches: Whether a small model is fetched in preference to a substitute.
        bits: Bits that a weight of the target is stored in; those of a small model are stored in 16.
    """
    refused = list[str]()
    most = min(_SMALL, _SMALL_BYTES * bits / 16)
    small = [draft for draft in known if not draft.trained and draft.share <= most]
    heads = [draft for draft in known if draft.trained and is_here(draft.id)]
    for draft in (*heads, *(draft for draft in small if fetches or is_here(draft.id))):
        problem = obstacle(draft.id)
        if problem is None:
            return DraftChoice((draft.id, _MIXED), f"draft: {draft.id}, {draft.reason}, with {_MIXED}")
        refused.append(problem)
    problem = obstacle(SUBSTITUTE)
    if problem is None:
        return DraftChoice((SUBSTITUTE, _MIXED), _other_than(known, small, refused))
    refused.append(problem)
    tried = {draft.id for draft in small} if fetches else set[str]()
    left = [draft for draft in known if not is_here(draft.id) and draft.id not in tried]
    # A head has the best chance to fit where a substitute does not, or else the smallest model.
    fetched = next(iter([draft for draft in left if draft.trained] or left[-1:]), None)
    if fetched is not None:
        problem = obstacle(fetched.id)
        if problem is None:
            line = f"draft: {fetched.id}, {fetched.reason}, with {_MIXED}, since {refused[-1]}"
            return DraftChoice((fetched.id, _MIXED), line)
        refused.append(problem)
    return DraftChoice((_MIXED,), f"draft: {_MIXED} alone, since {'; '.join(refused)}")


def _other_than(known: Sequence[KnownDraft], small: Sequence[KnownDraft], refused: Sequence[str]) -> str:
    """What to know where a substitute drafts: why not what is here, or what could be had."""
    if refused:
        return f"draft: a substitute of the target with {_MIXED}, since {refused[0]}"
    trained = [draft for draft in known if draft.trained]
    if not (trained or small):
        return ""
    best = (trained or small)[0]
    kind = f"{best.target} has a trained head" if trained else "a small model of its family may be faster"
    return f'draft: a substitute of the target with {_MIXED}; {kind}, which `draft="{best.id}"` fetches'
