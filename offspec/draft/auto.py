"""What `--draft auto` comes to: the best draft there is for a target, and in one line why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offspec.core.config import LOOKUPS, SUBSTITUTE
from offspec.draft.published import KnownDraft

_MIXED = LOOKUPS[0]  # what every draft is mixed with: it costs next to nothing


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
) -> DraftChoice:
    """The first that can be used: a published draft that was fetched before, a substitute, one to be fetched.

    Args:
        known: Published drafts for the target, the best kind first.
        is_here: Whether a hub id need not be fetched.
        obstacle: Opens a draft, and says in a clause why it cannot be used; None where it can.
    """
    refused = list[str]()
    for draft in known:
        if is_here(draft.id):
            problem = obstacle(draft.id)
            if problem is None:
                return DraftChoice((draft.id, _MIXED), f"draft: {draft.id}, {draft.reason}, with {_MIXED}")
            refused.append(problem)
    problem = obstacle(SUBSTITUTE)
    if problem is None:
        return DraftChoice((SUBSTITUTE, _MIXED), _other_than(known, refused))
    refused.append(problem)
    fetched = _to_fetch([draft for draft in known if not is_here(draft.id)])
    if fetched is not None:
        problem = obstacle(fetched.id)
        if problem is None:
            line = f"draft: {fetched.id}, {fetched.reason}, with {_MIXED}, since {refused[-1]}"
            return DraftChoice((fetched.id, _MIXED), line)
        refused.append(problem)
    return DraftChoice((_MIXED,), f"draft: {_MIXED} alone, since {'; '.join(refused)}")


def _other_than(known: Sequence[KnownDraft], refused: Sequence[str]) -> str:
    """What to know where a substitute drafts: why not what is here, or what could be had."""
    if refused:
        return f"draft: a substitute of the target with {_MIXED}, since {refused[0]}"
    trained = [draft for draft in known if draft.trained]
    if not trained:
        return ""
    best = trained[0]
    return (
        f"draft: a substitute of the target with {_MIXED}; {best.target} has a trained head, which "
        f'`draft="{best.id}"` fetches'
    )


def _to_fetch(known: Sequence[KnownDraft]) -> KnownDraft | None:
    """What has the best chance to fit where a substitute does not: a head, or else the smallest model."""
    heads = [draft for draft in known if draft.trained]
    return next(iter(heads or known[-1:]), None)
