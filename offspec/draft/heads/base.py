"""What every kind of head has in common, before it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offspec.draft.base import Drafter, Wants
from offspec.model.parts import TargetParts

LAST = Wants(last=True)


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


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A head whose headers were read and found to fit the target. Its weights are still on disk.

    Args:
        kind: A name of `draft.kinds.KINDS`.
        name: Name for people, as "medusa (3 heads)".
        fingerprint: Of its configuration and files.
        nbytes: Memory it takes when loaded, with caches and buffers for a number of positions of context.
        load: Reads the weights, in the target's dtype, onto its device, for that many positions.
        shares_head: Whether it asks for the target's logits, so that the target's head must stay in memory.
        embeds: Whether it looks tokens up in the target's embedding, at every step.
        wants: States of the target that it takes. Default: the last.
    """

    kind: str
    name: str
    fingerprint: str
    nbytes: Callable[[int], int]
    load: Callable[[TargetParts, int], Drafter]
    shares_head: bool = False
    embeds: bool = False
    wants: Wants = LAST
