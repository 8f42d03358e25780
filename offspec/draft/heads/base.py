"""Description of a head before it is loaded, common to all kinds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offspec.draft.base import Drafter, RequiredStates
from offspec.model.parts import TargetParts

LAST = RequiredStates(last=True)


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Properties of the target that a head is checked against, known from headers, whether loaded or not.

    config: the text configuration, as transformers reads it.
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
        kind: A key of `draft.kinds.KINDS`.
        name: Display name, such as "medusa (3 heads)".
        fingerprint: Fingerprint of its configuration and files.
        nbytes: Returns the bytes it takes when loaded, with caches and buffers for a number of context
            positions.
        load: Reads the weights, in the target's dtype, onto its device, for that many positions.
        shares_head: Whether it uses the target's logits, so that the target's head must stay in memory.
        uses_embedding: Whether it looks tokens up in the target's embedding at every step.
        required_states: States of the target that it needs. Default: the last.
    """

    kind: str
    name: str
    fingerprint: str
    nbytes: Callable[[int], int]
    load: Callable[[TargetParts, int], Drafter]
    shares_head: bool = False
    embeds: bool = False
    required_states: RequiredStates = LAST
