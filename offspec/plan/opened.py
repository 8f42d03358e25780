"""Models that were opened, and what of them would fit where."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offspec.checkpoint.hub import is_cached
from offspec.core.config import LOOKUPS, MTP, EngineConfig
from offspec.core.errors import CapacityError, OffspecError
from offspec.core.events import Notice
from offspec.draft.auto import Choice, choose_draft
from offspec.draft.heads.base import OpenedHead
from offspec.draft.open import DraftOpener, Drafts, Notify
from offspec.draft.published import KnownDraft
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec
from offspec.plan.fit import Fit, decide, holds, no_room, parts, unpacks
from offspec.plan.needs import WIDEST, Models

_LEAST = 16  # nodes that there must be room for beside a draft


@dataclass(frozen=True, slots=True)
class Opened:
    """A target and what drafts for it, whose headers were read, and the memory there is for them.

    config: with the sources that "auto" came to; asked: what --draft said. target_print: what tells the
    target from others. memory: bytes of RAM for the process; vram: of a device with memory of its own;
    runtime: what the process takes without any weights.
    """

    config: EngineConfig
    target: LoadedModel
    target_print: str
    drafts: Drafts
    memory: int
    vram: int | None
    runtime: int
    asked: str
    codec: TextCodec | None = None  # only where the models are to be loaded

    @property
    def draft(self) -> LoadedModel | None:
        """The drafter that is a model, if there is one."""
        return self.drafts.model

    @property
    def heads(self) -> tuple[OpenedHead, ...]:
        """Those that are not."""
        return tuple(self.drafts.heads.values())

    @property
    def draft_print(self) -> str:
        """What tells the main drafter from others, whatever bits it has; "none" where none drafts."""
        return self.drafts.fingerprint

    @property
    def models(self) -> Models:
        """What memory is divided among."""
        return Models(self.target, self.draft, self.heads, self.runtime)

    def alone(self) -> "Opened":
        """The target by itself."""
        return replace(self, drafts=Drafts())

    def close(self) -> None:
        """Close files and free what was loaded."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()

    def fit(self, config: EngineConfig, share: float = 1.0) -> Fit:
        """What fits where with these settings, were the target's layers `share` times as large as they are.

        Raises CapacityError, RequestError.
        """
        return decide(config, self.memory, self.vram, self.models, share)

    def holds(self, config: EngineConfig, fit: Fit) -> bool:
        """Whether an arrangement that was made before fits."""
        return holds(fit, config, self.memory, self.vram, self.models)

    def unpacks(self, config: EngineConfig, fit: Fit) -> bool:
        """Whether there is room to unpack a packed target, all of which stays, as it is loaded."""
        return unpacks(fit, config, self.memory, self.vram, self.models)

    def parts(self, config: EngineConfig, fit: Fit) -> tuple[tuple[str, str, int], ...]:
        """(what, tier, bytes) of all that takes room under an arrangement, and of what stays on disk."""
        layers = self.target.held_bytes if self.unpacks(config, fit) else self.target.layer_bytes
        return parts(config, self.models, fit, layers)

    def no_room(self, config: EngineConfig) -> str:
        """In a clause, why a substitute was left out, and what to do about it."""
        assert self.draft is not None
        return no_room(config, self.memory, self.vram, self.draft)

    def least(self, config: EngineConfig) -> tuple[int, int | None]:
        """The smallest RAM, and the smallest device memory, with which the rest as given would still do."""
        return (
            self._needed(config, 1, self.vram),
            None if self.vram is None else self._needed(config, self.memory, 1),
        )

    def _needed(self, config: EngineConfig, memory: int, vram: int | None) -> int:
        try:
            decide(config, memory, vram, self.models)
        except CapacityError as error:
            return error.needed
        return 0


def with_best_draft(
    opened: Opened, opener: DraftOpener, known: Sequence[KnownDraft], notify: Notify
) -> Opened:
    """With the best draft there is in the place of "auto"; see `choose_draft`."""
    tried = dict[str, Opened]()

    def obstacle(name: str) -> str | None:
        config = replace(opened.config, draft=f"{name},{LOOKUPS[0]}")
        try:
            found = replace(opened, config=config, drafts=opener.open([name]))
        except OffspecError as error:
            return str(error)
        tried[name] = found
        try:
            fit = found.fit(replace(config, budget=config.budget or _LEAST, width=config.width or WIDEST))
        except CapacityError:
            return f"{name} does not fit in memory beside the target"
        return found.no_room(config) if fit.draft_mode == "none" else None

    choice = Choice((LOOKUPS[0],))
    if opened.config.budget != 1:
        choice = choose_draft(known, lambda name: name == MTP or is_cached(name), obstacle)
    for name, found in tried.items():
        if name not in choice.names and found.draft is not None:
            found.draft.close()
    if choice.line:
        notify(Notice(choice.line))
    taken = tried.get(choice.names[0], opened)
    return replace(taken, config=replace(opened.config, draft=",".join(choice.names)))
