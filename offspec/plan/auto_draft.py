"""The draft that "auto" selects, decided in the same way for a run here and for a plan for other hardware."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from offspec.checkpoint import local_path
from offspec.checkpoint.hub_name import hub_name
from offspec.core.config import LOOKUPS
from offspec.core.errors import OffspecError
from offspec.draft.known_drafts import DraftChoice, KnownDraft, choose_draft
from offspec.draft.open import Drafts
from offspec.plan.fit import LEAST_BUDGET, self_draft_does_not_fit, try_fit
from offspec.plan.opened import OpenedModels


def is_hub_model(model: str) -> bool:
    """Return whether a target is named by a hub id; for other targets a run downloads no small model."""
    return hub_name(model) is not None and not local_path(model)[1]


def may_download_drafts(
    model: str,
    known: Sequence[KnownDraft],
    is_cached: Callable[[str], bool],
    is_reachable: Callable[[], bool],
) -> bool:
    """Return whether a run of this target may download a small model.

    Args:
        model: The target's name.
        known: Published drafts for it.
        is_cached: Returns whether a hub id needs no download.
        is_reachable: Returns whether the hub answers; called only if something would be downloaded.
    """
    small = [draft for draft in known if not draft.trained]
    return is_hub_model(model) and not all(is_cached(draft.id) for draft in small) and is_reachable()


def choose_auto_draft(
    opened: OpenedModels,
    known: Sequence[KnownDraft],
    open_draft: Callable[[str], Drafts],
    is_cached: Callable[[str], bool],
    *,
    fetches: bool,
) -> tuple[DraftChoice, dict[str, OpenedModels]]:
    """Choose the draft for a target; return the choice, see `choose_draft`, and each opened draft by name.

    Args:
        opened: The target, without a draft.
        known: Published drafts for the target.
        open_draft: Opens a draft by name. Raises OffspecError if it cannot be used.
        is_cached: Returns whether a draft needs no download.
        fetches: Whether downloading a small model is preferred to a self-draft.
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
            return f"{name} does not fit in memory together with the target"
        return self_draft_does_not_fit(found, wanted) if fit.draft_mode == "none" else None

    choice = DraftChoice((LOOKUPS[0],))
    if config.budget != 1:
        bits = opened.target.stored_bits
        choice = choose_draft(known, is_cached, obstacle, may_download=fetches, bits=bits)
    return choice, tried
