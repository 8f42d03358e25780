"""Whether a family's layers can take the rows of several sequences together, found out by trying it.

They can where a layer does nothing with keys but hand them from its cache to its attention, or where a module
of it takes the cache, and does whatever it does with keys for one sequence after the other.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from offspec.model.apart import take_apart
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.pass_parts import SequenceRows
from offspec.model.runner import CHUNK, TreeModel

_TOLERANCE = 2e-3  # of the spread of what a model puts out, where float32 rounds to some millionths
_NODES = 4  # of a tree behind each text


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    return bool((one - other).abs().max() <= _TOLERANCE * one.std())


@torch.no_grad()
def merges(model: TreeModel, tokens: Sequence[int]) -> tuple[bool, bool]:
    """Whether rows of two sequences have the states that they have in a pass by themselves, and whether
    attention has to take them apart for it.

    Args:
        model: A small one, with random weights; it is not to be used any more.
        tokens: Different ones, at least a dozen.
    """
    if model.skeleton.masked:
        return False, False
    model.skeleton, model.chunk = replace(model.skeleton, merges=True), CHUNK
    texts = [tokens[3:], tokens[:-1]]  # the positions and the number of tokens are others
    alone = [model.hidden_of([_rows(text, model)]) for text in texts]
    for apart in (False, True):
        if apart:
            for layer in model.skeleton.layers:
                take_apart(layer, model.row_counts)
        try:
            together = model.hidden_of([_rows(text, model) for text in texts])
        except Exception:  # code of any family, which was made for the keys of one sequence
            continue
        if equal(torch.cat(alone), together):
            return True, apart
    return False, False


def _rows(tokens: Sequence[int], model: TreeModel) -> SequenceRows:
    """A text with a chain of a few nodes behind it, which even models run that know no other tree."""
    rows, text = len(tokens), len(tokens) - _NODES
    seen = torch.ones(_NODES, _NODES, dtype=torch.bool).tril()
    cache = TreeCache(len(model.skeleton.layers), 4)
    return SequenceRows(torch.tensor(tokens), TreeContext(0, torch.arange(rows), text, seen), cache)
