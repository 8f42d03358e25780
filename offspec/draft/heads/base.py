"""What every kind of head has in common, before it is loaded."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offspec.draft.base import Drafter, Wants
from offspec.model.parts import TargetParts


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a head is checked against: of a target whose headers were read, loaded or not.

    config is the text configuration, as transformers reads it.
    """

    name: str
    hidden_size: int
    vocab_size: int
    layers: int
    dtype: torch.dtype
    device: torch.device
    config: Any


class OpenedHead(Protocol):
    """A head whose headers were read and found to fit the target. Its weights are still on disk.

    kind: a name of `draft.kinds.KINDS`; name: for people, "medusa (3 heads)";
    shares_head: it asks for the target's logits, so that the target's head must stay in memory; embeds: it
    looks tokens up in the target's embedding, at every step.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def shares_head(self) -> bool: ...

    @property
    def embeds(self) -> bool: ...

    @property
    def wants(self) -> Wants: ...

    def nbytes(self, rows: int) -> int:
        """Memory it takes when loaded, with caches and buffers for `rows` positions of context."""

    def load(self, parts: TargetParts, rows: int) -> Drafter:
        """Read the weights, in the target's dtype, onto the target's device."""
