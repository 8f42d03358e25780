"""What every source of guesses has in common.

Letters: W nodes expanded together, K children of each, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.model.cache import TreeCache
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_kernels.topk_children import BLOCK, topk_children
from offspec_kernels.transfer import download
from offspec_planners.acceptance import Calibration


@dataclass(frozen=True, slots=True)
class Children:
    """The likeliest children of W nodes, best first: token, log_prob (calibrated), x (raw), [W, K] each.

    drawn [W, V] float32: where the children are not the likeliest but were drawn, in this order and without
    replacement, the scores whose softmax they were drawn from; see `offspec.draft.sampled_scorer`.
    """

    token: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    x: NDArray[np.float32]
    drawn: torch.Tensor | None = None

    @classmethod
    def none(cls, count: int) -> "Children":
        """Nothing to say about so many nodes."""
        nothing = np.empty((count, 0), np.float32)
        return cls(nothing.astype(np.int64), nothing, nothing)

    def without(self, rows: NDArray[np.bool_]) -> "Children":
        """The same with nothing to say about some of the nodes [W]."""
        if not rows.any():
            return self
        return replace(self, log_prob=np.where(rows[:, None], np.float32(-np.inf), self.log_prob))


class Room:
    """Memory that scorers of one thread may share: what lies in it is read before the next of them begins."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """[rows, columns] float32, with anything in it."""
        if len(self._memory) < rows * columns or self._memory.device != device:
            self._memory = torch.empty(0)  # so that both are never there at once
            self._memory = torch.empty(rows * columns, device=device)
        return self._memory[: rows * columns].view(rows, columns)


class Scorer:
    """Turns a draft's logits into the probability that the target picks each token.

    x = the draft's processed logits (penalties, temperature; no filters, which would hide what the target
    may keep) plus the noise the target will add; softmax(x / tau), corrected by the calibration's table, is
    the estimate. noise is None for greedy decoding and for SpecExec's ranking. One buffer [W, V] in `room`
    is kept from step to step and worked on in place: fresh memory of that size costs several times what is
    computed in it.
    """

    def __init__(
        self,
        processor: LogitsProcessor,
        noise: GumbelNoise | None,
        calibration: Calibration,
        children: int = 32,
        room: Room | None = None,
    ) -> None:
        self._processor = processor
        self._noise = noise
        self._children = children
        self.calibration = calibration
        self._room = room or Room()

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self._processor.vocab_size

    @property
    def needs_paths(self) -> bool:
        """Whether `children` looks at the paths it is given."""
        return self._processor.needs_paths

    def children(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        positions: Sequence[int],
        depths: Sequence[int] = (0,),
        there: torch.Tensor | None = None,
    ) -> Children:
        """The likeliest children of W nodes.

        Args:
            logits: [W, V] at the nodes. V may be smaller than the target's: ids beyond it are never proposed.
            paths: Tokens of each node's path below the root; may be empty unless `needs_paths`.
            positions: [W], absolute, of the children.
            depths: [W] of the nodes, or [1] of all of them; 0 is the root.
            there: [W] int64, `positions` on the device of logits, where the caller has them there.
        """
        size = self._processor.vocab_size
        room = self._room.take(len(logits), -(-size // BLOCK) * BLOCK, logits.device)
        scores = self._processor.draft_scores(logits, paths, out=room[:, :size])
        noise = self._noise
        children = topk_children(
            scores,
            min(self._children, size),
            seed=None if noise is None else noise.key,
            positions=positions if there is None or noise is None or scores.device.type == "cpu" else there,
            tau=self.calibration.fit.tau,
            noise=None if noise is None else noise.row,
            table=None if noise is None else noise.table(positions),
            room=room,
        )
        token, log_prob, x = download(children.token, children.log_prob, children.relative)
        if self._processor.closes:  # a node whose tokens are all closed is the end of its path
            log_prob[np.isnan(log_prob[:, 0])] = -np.inf
        return Children(token=token, log_prob=self.calibration.table.apply(log_prob, depths), x=x)


def score(
    scorer: Scorer,
    logits: torch.Tensor,
    candidates: GrowingTree,
    nodes: Sequence[int],
    root: int,
    there: torch.Tensor | None = None,
) -> Children:
    """The likeliest children of W nodes by logits [W, V], below a root at this absolute position.

    there: [W] int64, the children's positions on the device of logits, where the caller has them there.
    """
    depths: list[int] = candidates.depth[nodes].tolist()
    paths = [candidates.path_tokens(node) for node in nodes] if scorer.needs_paths else []
    return scorer.children(logits, paths, [root + depth + 1 for depth in depths], depths, there)


@dataclass(frozen=True, slots=True)
class Wants:
    """What a drafter needs of the target's passes.

    Args:
        last: The final hidden states, behind the last norm.
        layers: Indices of layers whose inputs it needs; the number of layers stands for the output of the
            last one, before that norm.
    """

    last: bool = False
    layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.last or bool(self.layers)


@dataclass(frozen=True, slots=True)
class Features:
    """What the target made of the committed positions [start, start + n).

    last [n, H], behind the last norm; inputs: of each layer that was asked for, [n, H].
    """

    start: int
    last: torch.Tensor
    inputs: Mapping[int, torch.Tensor]

    def __len__(self) -> int:
        return len(self.last)


class Drafter(Protocol):
    """A source of draft tokens with a cache of the committed tokens, called step by step while a tree
    grows. wants: states of the target's passes that it needs."""

    name: str
    wants: Wants = Wants()

    def fork(self, target: TreeCache) -> "Drafter":
        """The same weights with a state of its own, at an empty text, for one more sequence.

        It is closed before the one that it was made of, and leaves the weights alone. target: the target's
        cache of that sequence.
        """

    def watch(self, look: Callable[[], None] | None) -> None:
        """Have something called in the midst of long steps; what it raises breaks them off."""
        return  # its steps are short

    def start(self, ids: Sequence[int]) -> None:
        """Catch up with the committed ids, the last of which is the root of the tree to come."""

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        """The children of some nodes of the tree.

        A node without a prediction has log-probabilities of -inf; K is 0 where none has one.

        Args:
            candidates: The tree so far.
            nodes: Ascending; the parent of each stands before it or was expanded before.
            scorer: Turns logits into children.
        """

    def commit(self, nodes: Sequence[int]) -> None:
        """The target accepted this path of candidates, from the root on; some it may never have expanded."""
        return  # there is no cache

    def observe(self, features: Features) -> None:
        """Take what a pass computed at positions that are committed now. Called after `commit`, if `wants`
        says so."""
        return  # it sees the tokens alone

    def adopt(self) -> None:
        """Take over what the target knows of the committed ids, where the two can share it."""
        return  # they share nothing

    def rewind(self, length: int) -> None:
        """Forget everything behind the first `length` committed ids."""

    def close(self) -> None:
        """Free what the drafter holds."""


class Lookup(Protocol):
    """A source that copies continuations from texts, many tokens deep at once, in negligible time."""

    name: str

    def fork(self) -> "Lookup":
        """One for one more sequence: it knows the texts of earlier, and what hits were worth."""

    def start(self, ids: Sequence[int]) -> None:
        """Catch up with the committed ids, the last of which is the root of the tree to come."""

    def below(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        """The likeliest continuations of the committed ids and a path of tokens below the root.

        Args:
            path: Tokens below the root.
            noise: What the target will add, where the draft shares it.
            most: Most nodes of the subtree.
            floor: Least log-probability of a node, from the end of the path on.
            max_depth: Most levels of the subtree.
        """

    def learn(self, tokens: Sequence[int]) -> None:
        """The target picked these tokens, from the root on, the bonus token last. Before the next `start`."""

    def rewind(self, length: int) -> None:
        """Forget that the committed ids go on behind the first `length`; the text may still be found."""

    def close(self) -> None:
        """Free what is held."""
