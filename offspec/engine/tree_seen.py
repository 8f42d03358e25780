"""What a pass did, for whoever looks: the path through its tree, and who guessed it."""

from collections.abc import Callable

import numpy as np

from offspec.core.events import Guessed, TreeSeen
from offspec.engine.decode import Decoding, PassResult


def accepted(done: PassResult) -> tuple[int, ...]:
    """The nodes that the target agreed with, root first: of a token that ends the answer, too, if guessed."""
    walk = done.walk
    last = done.growth.tree.children(walk.nodes[-1]).get(walk.tokens[-1])
    return walk.nodes if last is None else (*walk.nodes, last)


def guessed_by(done: PassResult, decoding: Decoding) -> Guessed:
    """Accepted tokens of each source that had any: of those who guessed a token, who thought it likeliest."""
    names = decoding.mixture.names if decoding.mixture is not None else ()
    counts = np.bincount(done.growth.tree.source[list(accepted(done)[1:])]).tolist()
    return tuple((name, count) for name, count in zip(names, counts, strict=False) if count)


def describe_tree(index: int, done: PassResult, spell: Callable[[int], str]) -> TreeSeen:
    """The tree of the pass of this number, its tokens spelt, and the path that the target took."""
    tree, path = done.growth.tree, accepted(done)
    return TreeSeen(
        index=index,
        parent=tuple(tree.parent.tolist()),
        text=tuple(spell(token) for token in tree.token.tolist()),
        probability=tuple(np.exp(tree.score).tolist()),
        accepted=path,
        bonus=spell(done.walk.tokens[-1]) if path == done.walk.nodes else "",
    )
