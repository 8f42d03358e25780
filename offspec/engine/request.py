"""One answer: pass after pass, from a prompt to its end, told as events."""

import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from offspec.core import memory as process_memory
from offspec.core.errors import CapacityError
from offspec.core.events import (
    Event,
    FinishReason,
    Guessed,
    PassProgress,
    PassStats,
    Piece,
    Prefill,
    Result,
    TextDelta,
    TokenLogprobs,
    TreeSeen,
    total_guessed,
)
from offspec.core.trace import Timeline
from offspec.engine.decode import DecodeState, Decoding, PassResult
from offspec.engine.detokenizer import TextStream
from offspec.engine.drafting import Drafting, Request
from offspec.engine.stopping import Ending, Halted
from offspec.model import device as devices
from offspec.model.contention import Contention
from offspec.plan.load import Assembly
from offspec_planners.placement import Tier


class RunningRequest:
    """A request on its way: `step` after `step` until there is a `reason` to stop, then its `result`.

    Args:
        request: What is asked.
        assembly: The loaded models.
        state: Token ids and caches, which go on from what they share with the prompt.
        drafting: What drafts for this request, and how trees are grown.
        notify: Takes the progress of a pass while it is under way.
        timeline: Records passes.
        contention: Looked at wherever a pass can be broken off.
    """

    def __init__(
        self,
        request: Request,
        assembly: Assembly,
        state: DecodeState,
        drafting: Drafting,
        notify: Callable[[Event], None],
        timeline: Timeline,
        contention: Contention,
    ) -> None:
        self.gaps: list[float] = []  # of every token chosen so far, see `Walk`
        self.reason: FinishReason | None = None
        self._request, self._assembly, self._state = request, assembly, state
        self._notify, self._timeline, self._contention = notify, timeline, contention
        codec, params = assembly.codec, request.params
        self._text = TextStream(codec, params.stop)
        ends = frozenset[int]() if params.ignore_eos else codec.eos_ids
        self._ending = Ending(params, ends, self._text)
        self._ending.room = assembly.context - len(request.ids)
        self._decoding = drafting.decoding(
            request,
            stop=self._ending.after,
            ends=ends.union(params.stop_token_ids),
            notify=notify,
            between=self._look,
            on_grown=self._grown,
        )
        self._draft = drafting.described(request.sources)
        self._spell = lru_cache(maxsize=4096)(lambda token: codec.spell([token]))
        self._passes: list[PassStats] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._shown: list[str] = []
        self._first = 0.0
        self._nodes = 0  # of the tree that is on its way through the target
        self._tell: Callable[[int], None] = lambda layer: None
        self._began = time.perf_counter()
        self._read_before = assembly.target.bytes_streamed
        reused = state.begin(request.ids)
        contention.begin()
        self.prefill = Prefill(len(request.ids) - reused, reused, 0, len(assembly.target.layers))

    def step(self) -> list[Event]:
        """Events of one more pass. Raises OffspecError; `held_back` then has the text that was not shown."""
        target = self._assembly.target
        read = target.bytes_streamed
        try:
            self._look()
            done = self._run_pass(read)
        except Halted:
            self.reason = "halted"
            return self.held_back()
        self.reason = self._ending.reason
        self._first = self._first or time.perf_counter() - self._began
        self._tokens += done.walk.tokens
        self.gaps += done.walk.gaps
        self._logprobs += done.walk.logprobs
        delta = self._delta(done)
        self._shown.append(delta.text)
        stats = self._stats(done, target.bytes_streamed - read)
        self._passes.append(stats)
        if self._request.trees:
            return [delta, describe_tree(len(self._passes), done, self._spell), stats]
        return [delta, stats]

    def held_back(self) -> list[Event]:
        """Text of tokens that were committed, now that nothing follows which could complete it."""
        rest = "".join(self._text.finish())
        self._shown.append(rest)
        return [TextDelta(rest, (), (Piece(rest, "bonus"),))] if rest else []

    def _look(self) -> None:
        """Called wherever a pass can be broken off. Raises Halted where that is asked for."""
        self._contention.look()
        if self._request.halt is not None and self._request.halt.is_set():
            raise Halted

    def _grown(self, nodes: int) -> None:
        """Called when the tree of a pass is complete."""
        self._nodes = nodes
        self._tell(0)

    def _run_pass(self, read: int) -> PassResult:
        target, recording = self._assembly.target, torch.is_grad_enabled()
        self._watch(read)
        try:
            with self._timeline.span("engine", "pass") as span:
                done = self._state.run_pass(self._decoding, self._ending.left - 1)
                span.note(nodes=len(done.grown.tree), emitted=len(done.walk.tokens))
            self._timeline.counter("bytes streamed", target.bytes_streamed)
            return done
        except BaseException as error:
            torch.set_grad_enabled(recording)  # Ctrl-C may have struck where it was about to be set back
            target.recover()
            if devices.is_out_of_memory(error):
                raise CapacityError(
                    "memory ran out in the middle of a pass; give a smaller --context or --budget, or close "
                    "what else uses memory",
                    needed=0,
                    given=self._assembly.vram or self._assembly.memory,
                ) from error
            raise
        finally:
            self._unwatch()

    def _watch(self, read: int) -> None:
        """Say how far the pass is, and look wherever it can be broken off."""
        target, prefill = self._assembly.target, self.prefill
        began, index = time.perf_counter(), len(self._passes) + 1
        self._nodes = 0

        def tell(layer: int) -> None:
            if index == 1 and layer:
                self._notify(Prefill(prefill.tokens, prefill.reused, layer, prefill.layers))
            streamed, seconds = target.bytes_streamed - read, time.perf_counter() - began
            self._notify(PassProgress(index, self._nodes, layer, prefill.layers, streamed, seconds))

        self._tell = tell
        tell(0)
        target.tree_model.on_layer = tell
        target.tree_model.between = self._look
        self._assembly.sources.watch(self._look)

    def _unwatch(self) -> None:
        model = self._assembly.target.tree_model
        model.on_layer = model.between = None
        self._assembly.sources.watch(None)

    def _delta(self, done: PassResult) -> TextDelta:
        """The text of a pass, token by token; what only the end sets free belongs to the last of them."""
        texts = self._text.finish() if self._ending.reason else self._text.take()
        guessed = len(accepted(done)) - 1
        pieces = [Piece(text, "draft" if i < guessed else "bonus") for i, text in enumerate(texts) if text]
        return TextDelta("".join(texts), done.walk.tokens, tuple(pieces), done.walk.logprobs)

    def _stats(self, done: PassResult, nbytes: int) -> PassStats:
        tree, spent = done.grown.tree, self._assembly.target.tree_model.spent
        return PassStats(
            index=len(self._passes) + 1,
            tree_nodes=len(tree),
            tree_depth=int(tree.depth.max()),
            draft_steps=done.grown.steps,
            emitted=len(done.walk.tokens),
            draft_seconds=done.draft_seconds,
            target_seconds=done.target_seconds,
            bytes_streamed=nbytes,
            wait_seconds=spent.waited,
            compute_seconds=spent.computed,
            guessed_by=guessed_by(done, self._decoding),
        )

    @property
    def result(self) -> Result:
        """What came of it, once there is a `reason`."""
        params, target = self._request.params, self._assembly.target
        assert params.seed is not None and self.reason is not None
        return Result(
            text="".join(self._shown),
            token_ids=tuple(self._tokens),
            passes=len(self._passes),
            seconds=time.perf_counter() - self._began,
            ttft_s=self._first,
            bytes_streamed=target.bytes_streamed - self._read_before,
            peak_memory_bytes=process_memory.peak_bytes(),
            finish_reason=self.reason,
            draft=self._draft,
            budget=1 if self._decoding.mixture is None else self._decoding.growth.budget,
            seed=params.seed,
            draft_seconds=sum(done.draft_seconds for done in self._passes),
            target_seconds=sum(done.target_seconds for done in self._passes),
            prompt_tokens=len(self._request.ids),
            reused_tokens=self.prefill.reused,
            peak_device_bytes=devices.peak_bytes(target.devices),
            cpu_layers=len(self._assembly.placement.layers(Tier.CPU)),
            guessed_by=total_guessed(done.guessed_by for done in self._passes),
            logprobs=None if params.logprobs is None else tuple(self._logprobs),
            kv_cache="int8" if target.int8_cache else "model",
        )


def accepted(done: PassResult) -> tuple[int, ...]:
    """The nodes that the target agreed with, root first: of a token that ends the answer, too, if guessed."""
    walk = done.walk
    last = done.grown.tree.children(walk.nodes[-1]).get(walk.tokens[-1])
    return walk.nodes if last is None else (*walk.nodes, last)


def guessed_by(done: PassResult, decoding: Decoding) -> Guessed:
    """Accepted tokens of each source that had any: of those who guessed a token, who thought it likeliest."""
    names = decoding.mixture.names if decoding.mixture is not None else ()
    counts = np.bincount(done.grown.tree.source[list(accepted(done)[1:])]).tolist()
    return tuple((name, count) for name, count in zip(names, counts, strict=False) if count)


def describe_tree(index: int, done: PassResult, spell: Callable[[int], str]) -> TreeSeen:
    """The tree of the pass of this number, its tokens spelt, and the path that the target took."""
    tree, path = done.grown.tree, accepted(done)
    return TreeSeen(
        index=index,
        parent=tuple(tree.parent.tolist()),
        text=tuple(spell(token) for token in tree.token.tolist()),
        probability=tuple(np.exp(tree.score).tolist()),
        accepted=path,
        bonus=spell(done.walk.tokens[-1]) if path == done.walk.nodes else "",
    )
