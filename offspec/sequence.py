"""The state of decoding: committed token ids, what both caches hold of them, and a pass over them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offspec.draft.base import Drafter, Scorer
from offspec.grow import Growth, GrowthPolicy, grow, no_growth
from offspec.grow_static import grow_static
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.noise import GumbelNoise
from offspec.sampling import LogitsProcessor
from offspec.timeline import OFF, Timeline
from offspec.verify import Walk, walk
from offspec_planners.sequoia import Shape


@dataclass(frozen=True, slots=True)
class Decoding:
    """What stays the same from pass to pass of one request.

    scorer: None without speculation. shape: of all trees, where they are not grown best first; it has no
    more nodes than the policy's budget. between: called between draft steps, and may raise to break the pass
    off; grown: called with the number of nodes once the tree is complete.
    """

    processor: LogitsProcessor
    noise: GumbelNoise | None
    scorer: Scorer | None
    policy: GrowthPolicy
    stop: Callable[[int], bool]
    shape: Shape | None = None
    between: Callable[[], None] | None = None
    grown: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass emitted, the tree it checked, and where its seconds went."""

    walk: Walk
    growth: Growth
    draft_seconds: float
    target_seconds: float


class TokenSequence:
    """Token ids and the caches that follow them.

    The target's cache covers `ids` but for the last at most, the root of the next tree; tokens of a new
    prompt that it does not cover yet ride along with the next pass.
    """

    def __init__(self, target: LoadedModel, drafter: Drafter | None, timeline: Timeline = OFF) -> None:
        self._target = target
        self._drafter = drafter
        self._timeline = timeline
        self.ids: list[int] = []

    @property
    def cached(self) -> int:
        """Committed positions whose keys and values the target holds."""
        return self._target.tree_model.cache.length

    def begin(self, prompt: Sequence[int]) -> int:
        """Make `prompt` the committed ids, keeping what the caches share with it; returns that length."""
        shared = 0
        limit = min(self.cached, len(self.ids), len(prompt) - 1)
        while shared < limit and self.ids[shared] == prompt[shared]:
            shared += 1
        self._target.tree_model.cache.rewind(shared)
        if self._drafter is not None:
            self._drafter.rewind(shared)
        self.ids = list(prompt)
        return shared

    @torch.no_grad()  # and not inference_mode, which an interrupt at its edge leaves on, with no way back
    def run_pass(self, decoding: Decoding, max_depth: int) -> PassResult:
        """Grow a tree, take it through the target with all pending tokens, walk it, commit the path.

        After an exception the committed ids are what they were; call `recover` before the next pass.
        """
        began = time.perf_counter()
        growth = self._grow(decoding, max_depth)
        if decoding.grown is not None:
            decoding.grown(len(growth.tree))
        grown = time.perf_counter()
        with self._timeline.span("engine", "target", nodes=len(growth.tree)):
            hidden = self._forward(growth)
        model = self._target.tree_model
        root = len(self.ids) - 1
        with self._timeline.span("verify", "walk") as span:
            result = walk(
                growth.tree,
                model.logits_by_row(hidden),
                decoding.processor,
                decoding.noise,
                root,
                decoding.stop,
            )
            span.note(emitted=len(result.tokens))
        with self._timeline.span("engine", "commit"):
            self._commit(growth, result, decoding)
        return PassResult(result, growth, grown - began, time.perf_counter() - grown)

    def _grow(self, decoding: Decoding, max_depth: int) -> Growth:
        drafter, scorer, policy = self._drafter, decoding.scorer, decoding.policy
        if drafter is None or scorer is None or policy.budget == 1 or max_depth < 1:
            return no_growth(self.ids[-1])
        with self._timeline.span("draft", "grow") as span:
            drafter.adopt()
            if decoding.shape is None:
                growth = grow(drafter, scorer, self.ids, policy, max_depth, self._timeline, decoding.between)
            else:
                growth = grow_static(
                    drafter,
                    scorer,
                    self.ids,
                    decoding.shape,
                    max_depth,
                    policy.width,
                    self._timeline,
                    decoding.between,
                )
            span.note(nodes=len(growth.tree), steps=growth.steps)
        return growth

    def _forward(self, growth: Growth) -> torch.Tensor:
        """Hidden states [N, H] of the tree's nodes; the pending tokens go through in front of them."""
        model, device = self._target.tree_model, self._target.device
        root = len(self.ids) - 1
        pending = self.ids[model.cache.length : root]
        tree = growth.tree
        tokens = torch.tensor([*pending, *tree.token.tolist()], device=device)
        positions = torch.cat([torch.arange(root - len(pending), root), root + torch.from_numpy(tree.depth)])
        ancestors = torch.from_numpy(tree.ancestors())
        if len(tree) == 1:
            # A product with a single row takes another path through the processor's library and rounds
            # otherwise; the products of two rows or two hundred agree to the last bit. So a lone root gets
            # company that nobody looks at, and plain decoding says what a tree says in bfloat16 too.
            tokens, positions = (torch.cat([rows, rows[-1:]]) for rows in (tokens, positions))
            ancestors = torch.eye(2, dtype=torch.bool)
        context = TreeContext(
            prefix=model.cache.length,
            position=positions.to(device),
            causal=len(pending),
            ancestors=ancestors.to(device),
        )
        return model.hidden(tokens, context)[len(pending) :]

    def _commit(self, growth: Growth, result: Walk, decoding: Decoding) -> None:
        cache = self._target.tree_model.cache
        pending = len(self.ids) - 1 - cache.length
        cache.commit(pending, result.nodes)
        self.ids.extend(result.tokens)
        decoding.processor.commit(result.tokens)
        if growth.steps and self._drafter is not None:
            self._drafter.commit([int(growth.candidates[node]) for node in result.nodes])
            if decoding.scorer is not None:
                growth.learn(decoding.scorer, result.nodes, result.tokens)

    def forget(self) -> None:
        """Let the next prompt be computed anew, whatever the caches hold of it."""
        self._target.tree_model.cache.rewind(0)

    def recover(self) -> None:
        """After a pass was broken off: drop its rows and set the stream going again."""
        self._target.recover()
