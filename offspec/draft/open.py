"""What drafts for a target, opened by its names in `--draft`: headers are read and checked against it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.core.config import LOOKUPS, NONE, SUBSTITUTE, EngineConfig
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
from offspec_planners.typical_acceptance import SUBSTITUTE as TYPICAL_SUBSTITUTE

Notify = Callable[[Event], None]
Kind = Literal["substitute", "model", "head", "none"]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafters whose headers were read. names: of them, in order; lookups need none and are not among them.

    model: the one that is a model of its own, or the target itself once more; codec: where it is named, its
    tokenizer; vocab: the tokens that it shares with the target, where it is not all of them. heads: by name.
    """

    names: tuple[str, ...] = ()
    model: LoadedModel | None = None
    model_print: str = ""
    codec: TextCodec | None = None
    vocab: VocabMap | None = None
    heads: Mapping[str, OpenedHead] = field(default_factory=dict)

    @property
    def main(self) -> str:
        """The first, whose guesses plans are made for; "none" where lookups are by themselves."""
        return self.names[0] if self.names else NONE

    @property
    def kind(self) -> Kind:
        """What the main one is like."""
        if self.main in self.heads:
            return "head"
        if self.main == SUBSTITUTE:
            return "substitute"
        return "model" if self.names else "none"

    @property
    def typical(self) -> TypicalDraft:
        """How well the main one is expected to guess."""
        if self.main in self.heads:
            return HEAD
        return TYPICAL_SUBSTITUTE if self.main == SUBSTITUTE else MODEL

    @property
    def fingerprint(self) -> str:
        """What tells the main one from others, whatever bits a model is rounded to."""
        if self.main in self.heads:
            return self.heads[self.main].fingerprint
        return self.model_print if self.names else NONE

    def without_model(self) -> "Drafts":
        """The heads alone."""
        return Drafts(tuple(name for name in self.names if name in self.heads), heads=self.heads)


class DraftOpener:
    """Opens what is to draft for one target, of which the headers were read."""

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
        """All of these but for lookups. Raises DraftError, RequestError and any CheckpointError.

        On an error nothing stays open.
        """
        found = Drafts()
        try:
            for name in names:
                if name not in (*LOOKUPS, NONE):
                    found = self._with(found, name)
        except BaseException:
            if found.model is not None:
                found.model.close()
            raise
        return found

    def _with(self, found: Drafts, name: str) -> Drafts:
        names = (*found.names, name)
        head = None if name == SUBSTITUTE else self._head(name)
        if head is not None:
            return replace(found, names=names, heads={**found.heads, name: head})
        if found.model is not None:
            other = next(name for name in found.names if name not in found.heads)
            raise RequestError(
                f"`draft` names two models, {other} and {name}, and there is room for one at a "
                "time: name one of them, with heads or lookups beside it"
            )
        found = replace(found, names=names)
        return self._with_substitute(found) if name == SUBSTITUTE else self._with_model(found, name)

    def _head(self, name: str) -> OpenedHead | None:
        """Whatever drafts with the target's own states; None where the name is a model's."""
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

    def _with_substitute(self, found: Drafts) -> Drafts:
        folder, tensors = self._checkpoint.folder, self._checkpoint.tensors
        model = LoadedModel(folder, tensors, self._target.dtype, self._target.device)
        return replace(found, model=model, model_print=substitute_print(self._checkpoint.fingerprint))

    def _with_model(self, found: Drafts, name: str) -> Drafts:
        """A model's headers, checked against the target. Raises DraftError and any CheckpointError."""
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
        return replace(found, model=model, model_print=other.fingerprint, codec=codec, vocab=vocab)


def substitute_print(fingerprint: str) -> str:
    """What tells a substitute of the model of this fingerprint from that model, drafting for another."""
    return f"{fingerprint} substitute"
