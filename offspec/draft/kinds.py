"""Kinds of drafters that use the target's states or text, with one entry each.

An entry determines how a head is recognized and opened, the list in error messages, the reason given for
choosing a published head, and the acceptance rate assumed before it has been measured.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offspec.checkpoint import Checkpoint
from offspec.core.config import EARLY_EXIT, MTP
from offspec.draft.base import Lookup
from offspec.draft.early_exit import open_early_exit
from offspec.draft.heads import eagle, medusa, mlp_speculator
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.eagle_files import EAGLE, EAGLE3, kind_of
from offspec.draft.heads.files import HeadFiles
from offspec.draft.heads.mtp import open_mtp
from offspec.draft.lookup.ngram import NgramLookup
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.model.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class HeadFileFormat:
    """Recognition of a kind of head by its files.

    Args:
        recognizes: Returns whether a config.json and tensor names belong to such a head.
        opened: Opens a head, checked against the target.
        keys: Keys of config.json that hint at this kind before the tensors are known.
        word: Part of repository names that hints at this kind.
    """

    recognizes: Callable[[Mapping[str, Any], Collection[str]], bool]
    opened: Callable[[HeadFiles, TargetShape], OpenedHead]
    keys: tuple[str, ...]
    word: str


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of head.

    Args:
        title: Display name.
        reason: Short reason to use a published head of this kind.
        files: How to recognize it by its files. Default None: it comes with the target.
        of_target: Opens the head that comes with the target; returns None if the target has none.
    """

    title: str
    reason: str
    files: HeadFileFormat | None = None
    of_target: Callable[[Checkpoint, LoadedModel, TargetShape], OpenedHead | None] | None = None


def _is_eagle(kind: str) -> Callable[[Mapping[str, Any], Collection[str]], bool]:
    return lambda config, names: kind_of(config, names) == kind


KINDS = {  # by `OpenedHead.kind`, best first
    MTP: HeadKind(
        "MTP",
        "in the target's own checkpoint, trained along with it",
        of_target=lambda checkpoint, target, shape: open_mtp(checkpoint, shape),
    ),
    EAGLE3: HeadKind(
        "EAGLE-3",
        "one layer over states of three of the target's",
        HeadFileFormat(
            _is_eagle(EAGLE3), eagle.opened, ("draft_vocab_size", "speculators_model_type"), "eagle"
        ),
    ),
    EAGLE: HeadKind(
        "EAGLE",
        "one layer over the target's last states",
        HeadFileFormat(_is_eagle(EAGLE), eagle.opened, ("speculators_model_type",), "eagle"),
    ),
    "medusa": HeadKind(
        "Medusa",
        "a head for each token ahead",
        HeadFileFormat(medusa.recognizes, medusa.opened, ("medusa_num_heads",), "medusa"),
    ),
    "mlp_speculator": HeadKind(
        "MLPSpeculator",
        "small layers over the target's last state",
        HeadFileFormat(mlp_speculator.recognizes, mlp_speculator.opened, (), "speculator"),
    ),
    EARLY_EXIT: HeadKind(
        "early exit",
        "layers of the target that stay in memory",
        of_target=lambda checkpoint, target, shape: open_early_exit(target, checkpoint.fingerprint),
    ),
}
OF_TARGET = {name: kind.of_target for name, kind in KINDS.items() if kind.of_target is not None}
IN_FILES = {kind.title: kind.files for kind in KINDS.values() if kind.files is not None}
LOOKUPS: dict[str, Callable[[], Lookup]] = {"suffix": SuffixLookup, "lookup": NgramLookup}
