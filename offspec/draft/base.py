"""Interfaces and data shared by all draft sources.

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
    """Likeliest children of W nodes, best first: token, log_prob (calibrated) and x (raw score), [W, K] each.

    drawn_scores [W, V] float32: the scores whose softmax the children were drawn from, if the children were
    drawn in this order without replacement instead of ranked; see `offspec.draft.sampled_scorer`.
    """

    token: NDArray[np.int64]
    log_prob: NDArray[np.float32]
    x: NDArray[np.float32]
    drawn_scores: torch.Tensor | None = None

    @classmethod
    def none(cls, count: int) -> "Children":
        """Return no children for `count` nodes."""
        nothing = np.empty((count, 0), np.float32)
        return cls(nothing.astype(np.int64), nothing, nothing)

    def without(self, rows: NDArray[np.bool_]) -> "Children":
        """Return a copy with no children for the nodes marked in `rows` [W]."""
        if not rows.any():
            return self
        return replace(self, log_prob=np.where(rows[:, None], np.float32(-np.inf), self.log_prob))


class ScoreBuffer:
    """Memory shared by the scorers of one thread; its contents are valid until the next scorer uses it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialized float32 tensor [rows, columns]."""
        if len(self._memory) < rows * columns or self._memory.device != device:
            self._memory = torch.empty(0)  # so that both are never there at once
            self._memory = torch.empty(rows * columns, device=device)
        return self._memory[: rows * columns].view(rows, columns)


class Scorer:
    """Turns a draft's logits into the probability that the target picks each token.

    x = the draft's processed logits (penalties and temperature; no filters, which could hide tokens that the
    target keeps) plus the noise that the target will add. softmax(x / tau), corrected by the calibration's
    table, is the estimate. noise is None for greedy decoding and for SpecExec's ranking. One buffer [W, V] in
    `buffer` is reused from step to step and modified in place: allocating memory of that size costs several
    times the computation in it.
    """

    def __init__(
        self,
        processor: LogitsProcessor,
        noise: GumbelNoise | None,
        calibration: Calibration,
        children: int = 32,
        buffer: ScoreBuffer | None = None,
    ) -> None:
        self._processor = processor
        self._noise = noise
        self._children = children
        self.calibration = calibration
        self._room = buffer or ScoreBuffer()

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self._processor.vocab_size

    @property
    def needs_paths(self) -> bool:
        """Whether `children` reads the paths it is given."""
        return self._processor.needs_paths

    def children(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        positions: Sequence[int],
        depths: Sequence[int] = (0,),
        device_positions: torch.Tensor | None = None,
    ) -> Children:
        """Return the likeliest children of W nodes.

        Args:
            logits: Logits [W, V] at the nodes. V may be smaller than the target's: ids beyond it are never
                proposed.
            paths: Tokens of each node's path below the root; may be empty unless `needs_paths`.
            positions: Absolute positions [W] of the children.
            depths: Depths [W] of the nodes, or [1] if all have the same; 0 is the root.
            device_positions: `positions` [W] int64 on the device of the logits, if the caller has them there.
        """
        size = self._processor.vocab_size
        room = self._room.take(len(logits), -(-size // BLOCK) * BLOCK, logits.device)
        scores = self._processor.draft_scores(logits, paths, out=room[:, :size])
        noise = self._noise
        children = topk_children(
            scores,
            min(self._children, size),
            seed=None if noise is None else noise.key,
            positions=positions
            if device_positions is None or noise is None or scores.device.type == "cpu"
            else device_positions,
            tau=self.calibration.fit.tau,
            noise=None if noise is None else noise.row,
            table=None if noise is None else noise.table(positions),
            scratch=room,
        )
        token, log_prob, x = download(children.token, children.log_prob, children.relative)
        if self._processor.may_mask_tokens:  # a node whose tokens are all closed is the end of its path
            log_prob[np.isnan(log_prob[:, 0])] = -np.inf
        return Children(token=token, log_prob=self.calibration.table.apply(log_prob, depths), x=x)


def score_children(
    scorer: Scorer,
    logits: torch.Tensor,
    candidates: GrowingTree,
    nodes: Sequence[int],
    root: int,
    device_positions: torch.Tensor | None = None,
) -> Children:
    """Return the likeliest children of W nodes by logits [W, V], below a root at absolute position `root`.

    device_positions: the children's positions [W] int64 on the device of the logits, if the caller has them
    there.
    """
    depths: list[int] = candidates.depth[nodes].tolist()
    paths = [candidates.path_tokens(node) for node in nodes] if scorer.needs_paths else []
    return scorer.children(logits, paths, [root + depth + 1 for depth in depths], depths, device_positions)


@dataclass(frozen=True, slots=True)
class RequiredStates:
    """States of the target's passes that a drafter needs.

    Args:
        last: The final hidden states, after the last norm.
        layers: Indices of layers whose inputs are needed; the number of layers means the output of the last
            layer, before the last norm.
    """

    last: bool = False
    layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.last or bool(self.layers)


@dataclass(frozen=True, slots=True)
class Features:
    """Target states at the committed positions [start, start + n).

    last: final hidden states [n, H], after the last norm. inputs: inputs [n, H] of each required layer.
    """

    start: int
    last: torch.Tensor
    inputs: Mapping[int, torch.Tensor]

    def __len__(self) -> int:
        return len(self.last)


class Drafter(Protocol):
    """A source of draft tokens with a cache of the committed tokens, called step by step while a tree grows.

    required_states: states of the target's passes that the drafter needs.
    """

    name: str
    required_states: RequiredStates = RequiredStates()

    def fork(self, target: TreeCache) -> "Drafter":
        """Return a drafter with the same weights and its own empty state, for one more sequence.

        Close the fork before the original; closing it does not free the weights. target: the target's cache
        of that sequence.
        """

    def set_cancel_check(self, check_cancelled: Callable[[], None] | None) -> None:
        """Set a function to call during long steps; an exception it raises cancels the step."""
        return  # its steps are short

    def start(self, ids: Sequence[int]) -> None:
        """Catch up with the committed ids, the last of which is the root of the next tree."""

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        """Return the children of some nodes of the tree.

        A node without a prediction has log-probabilities of -inf; K is 0 if no node has one.

        Args:
            candidates: The tree so far.
            nodes: Node numbers, ascending; each node's parent precedes it or was expanded earlier.
            scorer: Turns logits into children.
        """

    def commit(self, nodes: Sequence[int]) -> None:
        """Commit the path of candidates that the target accepted, root first; some may not have been
        expanded.
        """
        return  # there is no cache

    def observe(self, features: Features) -> None:
        """Read the target states of newly committed positions. Called after `commit`, if `required_states`
        is set.
        """
        return  # it sees the tokens alone

    def adopt_target_cache(self) -> None:
        """Take over the target's KV cache of the committed ids, if the drafter can share it."""
        return  # they share nothing

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` committed ids."""

    def close(self) -> None:
        """Free the drafter's memory."""


class Lookup(Protocol):
    """A source that copies continuations from texts, many tokens deep at once, in negligible time."""

    name: str

    def fork(self) -> "Lookup":
        """Return a lookup for one more sequence, with the earlier texts and the acceptance statistics so
        far.
        """

    def start(self, ids: Sequence[int]) -> None:
        """Catch up with the committed ids, the last of which is the root of the next tree."""

    def continuations(
        self,
        path: Sequence[int],
        noise: GumbelNoise | None,
        max_nodes: int,
        min_log_prob: float,
        max_depth: int,
    ) -> Subtree:
        """Return the likeliest continuations of the committed ids and a path of tokens below the root.

        Args:
            path: Tokens below the root.
            noise: Noise that the target will add, if the draft shares it.
            max_nodes: Maximum nodes of the subtree.
            min_log_prob: Minimum log-probability of a node, from the end of the path on.
            max_depth: Maximum levels of the subtree.
        """

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that the target picked, root first, bonus token last. Called before the
        next `start`.
        """

    def rewind(self, length: int) -> None:
        """Drop the committed ids after the first `length` as the current text; they can still be found."""

    def close(self) -> None:
        """Free the lookup's memory."""
