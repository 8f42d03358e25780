"""Opened models, headers only, and the memory limits that are divided among them."""

from dataclasses import dataclass, replace

from offspec.core.config import EngineConfig
from offspec.draft.heads.base import OpenedHead
from offspec.draft.open import Drafts
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class OpenedModels:
    """A target and its drafters, with their headers read, and the memory available for them.

    Args:
        config: Settings, with the sources that "auto" resolved to.
        target: The model to run.
        target_fingerprint: Fingerprint of the target.
        drafts: Models and heads that draft for the target.
        memory: Bytes of RAM for the process.
        vram: Bytes of a device with its own memory; None if the target is computed in RAM.
        more_vram: Bytes of each further GPU.
        runtime: Bytes of the process without any weights.
        draft_option: Value of `draft`.
        codec: The target's tokenizer, if the models are to be loaded.
    """

    config: EngineConfig
    target: LoadedModel
    target_fingerprint: str
    drafts: Drafts
    memory: int
    vram: int | None
    runtime: int
    draft_option: str
    codec: TextCodec | None = None
    more_vram: tuple[int, ...] = ()

    @property
    def draft(self) -> LoadedModel | None:
        """The draft model, if there is one."""
        return self.drafts.model

    @property
    def heads(self) -> tuple[OpenedHead, ...]:
        """Drafters that are heads instead of models."""
        return tuple(self.drafts.heads.values())

    @property
    def embeds(self) -> bool:
        """Whether a head looks tokens up in the target's embedding, which then stays in RAM."""
        return any(head.embeds for head in self.heads)

    def alone(self) -> "OpenedModels":
        """Return a copy with the target alone."""
        return replace(self, drafts=Drafts())

    def close(self) -> None:
        """Close files and free loaded weights."""
        self.target.close()
        if self.draft is not None:
            self.draft.close()
