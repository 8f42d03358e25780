"""The draft that "auto" stands for: one decision, for a run here and for a plan for another machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from offspec.checkpoint import local_path
from offspec.checkpoint.hub_name import hub_name
from offspec.core.config import LOOKUPS
from offspec.core.errors import OffspecError
from offspec.draft.open import Drafts
from offspec.draft.published import DraftChoice, KnownDraft, choose_draft
from offspec.plan.fit import LEAST_BUDGET, no_room_for_substitute, try_fit
from offspec.plan.opened import OpenedModels


def of_hub(model: str) -> bool:
    """Return whether a target is of the hub; for one that is not, a run fetches no small model."""
    return hub_name(model) is not None and not local_path(model)[1]


def fetches_drafts(
    model: str,
    known: Sequence[KnownDraft],
    is_here: Callable[[str], bool],
    is_reachable: Callable[[], bool],
) -> bool:
    """Return whether a run of this target may fetch a small model.

    Args:
        model: The target's name.
        known: Published drafts for it.
        is_here: Whether a hub id need not be fetched.
        is_reachable: Whether the hub answers; called only if something would be fetched.
    """
    small = [draft for draft in known if not draft.trained]
    return of_hub(model) and not all(is_here(draft.id) for draft in small) and is_reachable()


def choose_auto_draft(
    opened: OpenedModels,
    known: Sequence[KnownDraft],
    open_draft: Callable[[str], Drafts],
    is_here: Callable[[str], bool],
    *,
    fetches: bool,
) -> tuple[DraftChoice, dict[str, OpenedModels]]:
    """Choose the draft for a target: the choice, see `choose_draft`, and each draft that was opened, by name.

    Args:
        opened: The target, without a draft.
        known: Published drafts for the target.
        open_draft: Opens a draft by name. Raises OffspecError where it cannot be used.
        is_here: Whether a draft need not be fetched.
        fetches: Whether a small model is fetched in preference to a substitute.
    """
    config = opened.config
    tried = dict[str, OpenedModels]()

    def obstacle(name: str) -> str | None:
        wanted = replace(config, draft=f"{name},{LOOKUPS[0]}")
        try:
            found = replace(opened, config=wanted, drafts=open_draft(name))
        except OffspecError as error:
            return str(error)
        tried[name] = found
        fit = try_fit(found, replace(wanted, budget=config.budget or LEAST_BUDGET))
        if fit is None:
            return f"{name} does not fit in memory beside the target"
        return no_room_for_substitute(found, wanted) if fit.draft_mode == "none" else None

    choice = DraftChoice((LOOKUPS[0],))
    if config.budget != 1:
        bits = opened.target.stored_bits
        choice = choose_draft(known, is_here, obstacle, fetches=fetches, bits=bits)
    return choice, tried
