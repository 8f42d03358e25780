"""Opens the draft sources named in `--draft`: reads headers and checks them against the target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.open import check_draft
from offspec.core.config import LOOKUPS, NONE, SELF_DRAFT, EngineConfig
from offspec.core.errors import DraftError, RequestError, UnsupportedModelError
from offspec.core.events import Event, Notice
from offspec.draft.cross_vocab.vocab_map import VocabMap
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.open import open_head
from offspec.draft.kinds import KINDS, OF_TARGET
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec.model.vocabulary import same_vocabulary
from offspec_planners.typical_acceptance import HEAD, MODEL, TypicalDraft
from offspec_planners.typical_acceptance import SELF_DRAFT as TYPICAL_SELF_DRAFT

Notify = Callable[[Event], None]
Kind = Literal["self-draft", "model", "head", "none"]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Opened drafters, headers only. names: their names, in order, without lookups, which need no files.

    model: the draft that is a model, or the target itself for a self-draft. codec: its tokenizer, if it was
    opened by name. vocab: the tokens it shares with the target, unless it has all of them. heads: heads by
    name.
    """

    names: tuple[str, ...] = ()
    model: LoadedModel | None = None
    model_fingerprint: str = ""
    codec: TextCodec | None = None
    vocab: VocabMap | None = None
    heads: Mapping[str, OpenedHead] = field(default_factory=dict)

    @property
    def main(self) -> str:
        """Name of the first drafter, for which plans are made; "none" if there are only lookups."""
        return self.names[0] if self.names else NONE

    @property
    def kind(self) -> Kind:
        """Kind of the main drafter."""
        if self.main in self.heads:
            return "head"
        if self.main == SELF_DRAFT:
            return "self-draft"
        return "model" if self.names else "none"

    @property
    def typical(self) -> TypicalDraft:
        """Acceptance to assume of the main drafter before it is measured."""
        if self.main in self.heads:
            return HEAD
        return TYPICAL_SELF_DRAFT if self.main == SELF_DRAFT else MODEL

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the main drafter, independent of the bits it is quantized to."""
        if self.main in self.heads:
            return self.heads[self.main].fingerprint
        return self.model_fingerprint if self.names else NONE

    def without_model(self) -> "Drafts":
        """Return a copy with heads only."""
        return Drafts(tuple(name for name in self.names if name in self.heads), heads=self.heads)


class DraftOpener:
    """Opens draft sources for one target whose headers were read."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        target: LoadedModel,
        codec: TextCodec,
        notify: Notify,
    ) -> None:
        self._config, self._checkpoint, self._target = config, checkpoint, target
        self._codec, self._notify = codec, notify

    def open(self, names: Sequence[str]) -> Drafts:
        """Open all named sources except lookups. Raises DraftError, RequestError and any CheckpointError.

        After an error nothing stays open.
        """
        found = Drafts()
        try:
            for name in names:
                if name not in (*LOOKUPS, NONE):
                    check_draft(name)
                    found = self._with(found, name)
        except BaseException:
            if found.model is not None:
                found.model.close()
            raise
        return found

    def _with(self, found: Drafts, name: str) -> Drafts:
        names = (*found.names, name)
        head = None if name == SELF_DRAFT else self._head(name)
        if head is not None:
            return replace(found, names=names, heads={**found.heads, name: head})
        if found.model is not None:
            other = next(name for name in found.names if name not in found.heads)
            raise RequestError(
                f"`draft` names two models, {other} and {name}, but only one can be loaded at a "
                "time: name one of them, plus heads or lookups"
            )
        found = replace(found, names=names)
        return self._with_self_draft(found) if name == SELF_DRAFT else self._with_model(found, name)

    def _head(self, name: str) -> OpenedHead | None:
        """Open a drafter that uses the target's own states; return None if the name is a model's."""
        config = self._target.skeleton.config
        shape = TargetShape(
            name=self._config.model,
            hidden_size=config.hidden_size,
            vocab_size=self._target.skeleton.vocab_size,
            layers=len(self._target.layers),
            dtype=self._target.dtype,
            device=self._target.device,
            config=config,
        )
        if name not in OF_TARGET:
            return open_head(name, shape, self._notify)
        module = OF_TARGET[name](self._checkpoint, self._target, shape)
        if module is None:
            raise DraftError(
                f"the checkpoint of {shape.name} has no {KINDS[name].title} module: use another `draft`"
            )
        return module

    def _with_self_draft(self, found: Drafts) -> Drafts:
        folder, tensors = self._checkpoint.folder, self._checkpoint.tensors
        model = LoadedModel(folder, tensors, self._target.dtype, self._target.device)
        return replace(
            found, model=model, model_fingerprint=self_draft_fingerprint(self._checkpoint.fingerprint)
        )

    def _with_model(self, found: Drafts, name: str) -> Drafts:
        """Open a model's headers and check them against the target. Raises DraftError and any
        CheckpointError.
        """
        ours, other = self._codec.tokenizer, open_checkpoint(name, notify=self._notify)
        try:
            model = LoadedModel(other.folder, other.tensors, self._target.dtype, self._target.device)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"the draft {name} cannot be used: {error}") from error
        codec = TextCodec(load_tokenizer(other.folder), other.folder, other.config)
        size, vocab = model.skeleton.vocab_size, None
        if same_vocabulary(ours, codec.tokenizer) is not None or size < len(ours):
            vocab = VocabMap.between(ours, codec.tokenizer, size)
            self._notify(Notice(f"{name} has another vocabulary than the target: {vocab.report}"))
        return replace(found, model=model, model_fingerprint=other.fingerprint, codec=codec, vocab=vocab)


def self_draft_fingerprint(fingerprint: str) -> str:
    """Return the fingerprint of a self-draft, given that of its target."""
    return f"{fingerprint} substitute"
