"""One answer: pass after pass, from a prompt to its end, told as events."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from offspec.core import memory as process_memory
from offspec.core.config import SamplingParams
from offspec.core.errors import CapacityError, OffspecError
from offspec.core.events import (
    Event,
    Finished,
    FinishReason,
    Guessed,
    PassProgress,
    PassStats,
    Piece,
    Prefill,
    Result,
    TextDelta,
    TreeSeen,
    total_guessed,
)
from offspec.core.trace import Timeline
from offspec.engine.contention import Contention
from offspec.engine.decode import DecodeState, Decoding, PassResult
from offspec.engine.detokenizer import TextStream
from offspec.engine.stopping import Ending, Halted
from offspec.model import device as devices
from offspec.plan.load import Assembly
from offspec.sampling.noise import request_key


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: token ids of the prompt and how to go on from them. params: with a seed.

    sources: names of those that guess, none to decode one token a pass. halt: may be set from any thread, to
    end the answer with what there is. trees: whether to show them.
    """

    ids: Sequence[int]
    params: SamplingParams
    sources: tuple[str, ...] = ()
    halt: threading.Event | None = None
    trees: bool = False

    @property
    def key(self) -> int:
        """Of everything random in it."""
        assert self.params.seed is not None
        return request_key(self.params.seed, self.ids)


class RunningRequest:
    """A request on its way; `events` runs it to its end.

    gaps: of every token chosen so far, see `Walk`. draft: for the result.
    """

    def __init__(
        self,
        request: Request,
        assembly: Assembly,
        sequence: DecodeState,
        decoding: Callable[[Ending, "RunningRequest"], Decoding],
        *,
        context: int,
        draft: str,
        notify: Callable[[Event], None],
        timeline: Timeline,
        contention: Contention,
    ) -> None:
        self.gaps: list[float] = []
        self._request, self._assembly, self._sequence = request, assembly, sequence
        self._draft = draft
        self._notify, self._timeline, self._contention = notify, timeline, contention
        codec, params = assembly.codec, request.params
        self._text = TextStream(codec, params.stop)
        self._ending = Ending(params, frozenset() if params.ignore_eos else codec.eos_ids, self._text)
        self._ending.room = context - len(request.ids)
        self._decoding = decoding(self._ending, self)
        self._spell = lru_cache(maxsize=4096)(lambda token: codec.spell([token]))
        self._passes: list[PassStats] = []
        self._tokens: list[int] = []
        self._shown: list[str] = []
        self._first = 0.0
        self._nodes = 0  # of the tree that is on its way through the target
        self._tell: Callable[[int], None] = lambda layer: None

    def look(self) -> None:
        """Called wherever a pass can be broken off. Raises Halted where that is asked for."""
        self._contention.look()
        if self._request.halt is not None and self._request.halt.is_set():
            raise Halted

    def grown(self, nodes: int) -> None:
        """Called when the tree of a pass is complete."""
        self._nodes = nodes
        self._tell(0)

    def events(self) -> Generator[Event, None, None]:
        """All of it, `Finished` last. Raises OffspecError."""
        began = time.perf_counter()
        target, ids = self._assembly.target, self._request.ids
        read_before = target.bytes_streamed
        reused = self._sequence.begin(ids)
        self._contention.begin()
        prefill = Prefill(len(ids) - reused, reused, 0, len(target.layers))
        yield prefill
        reason: FinishReason | None = None
        while reason is None:
            read = target.bytes_streamed
            try:
                self.look()
                done = self._run_pass(prefill, read)
            except Halted:
                reason = "halted"
                yield from self._held_back()
                break
            except OffspecError:
                yield from self._held_back()
                raise
            reason = self._ending.reason
            self._first = self._first or time.perf_counter() - began
            self._tokens += done.walk.tokens
            self.gaps += done.walk.gaps
            delta = self._delta(done)
            self._shown.append(delta.text)
            stats = self._stats(done, target.bytes_streamed - read)
            self._passes.append(stats)
            yield delta
            if self._request.trees:
                yield describe_tree(len(self._passes), done, self._spell)
            yield stats
        yield Finished(self._result(reason, began, target.bytes_streamed - read_before, reused))

    def _held_back(self) -> Iterator[Event]:
        """Text of tokens that were committed, now that nothing follows which could complete it."""
        rest = "".join(self._text.finish())
        self._shown.append(rest)
        if rest:
            yield TextDelta(rest, (), (Piece(rest, "bonus"),))

    def _run_pass(self, prefill: Prefill, read: int) -> PassResult:
        target, recording = self._assembly.target, torch.is_grad_enabled()
        self._watch(prefill, read)
        try:
            with self._timeline.span("engine", "pass") as span:
                done = self._sequence.run_pass(self._decoding, self._ending.left - 1)
                span.note(nodes=len(done.growth.tree), emitted=len(done.walk.tokens))
            self._timeline.counter("bytes streamed", target.bytes_streamed)
            return done
        except BaseException as error:
            torch.set_grad_enabled(recording)  # Ctrl-C may have struck where it was about to be set back
            self._sequence.recover()
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

    def _watch(self, prefill: Prefill, read: int) -> None:
        """Say how far the pass is, and look wherever it can be broken off."""
        target, began, index = self._assembly.target, time.perf_counter(), len(self._passes) + 1
        self._nodes = 0

        def tell(layer: int) -> None:
            if index == 1 and layer:
                self._notify(Prefill(prefill.tokens, prefill.reused, layer, prefill.layers))
            streamed, seconds = target.bytes_streamed - read, time.perf_counter() - began
            self._notify(PassProgress(index, self._nodes, layer, prefill.layers, streamed, seconds))

        self._tell = tell
        tell(0)
        target.tree_model.on_layer = tell
        target.tree_model.between = self.look
        self._assembly.sources.watch(self.look)

    def _unwatch(self) -> None:
        model = self._assembly.target.tree_model
        model.on_layer = model.between = None
        self._assembly.sources.watch(None)

    def _delta(self, done: PassResult) -> TextDelta:
        """The text of a pass, token by token; what only the end sets free belongs to the last of them."""
        texts = self._text.finish() if self._ending.reason else self._text.take()
        guessed = len(accepted(done)) - 1
        pieces = [Piece(text, "draft" if i < guessed else "bonus") for i, text in enumerate(texts) if text]
        return TextDelta("".join(texts), done.walk.tokens, tuple(pieces))

    def _stats(self, done: PassResult, nbytes: int) -> PassStats:
        tree, spent = done.growth.tree, self._assembly.target.tree_model.spent
        return PassStats(
            index=len(self._passes) + 1,
            tree_nodes=len(tree),
            tree_depth=int(tree.depth.max()),
            draft_steps=done.growth.steps,
            emitted=len(done.walk.tokens),
            draft_seconds=done.draft_seconds,
            target_seconds=done.target_seconds,
            bytes_streamed=nbytes,
            wait_seconds=spent.waited,
            compute_seconds=spent.computed,
            guessed_by=guessed_by(done, self._decoding),
        )

    def _result(self, reason: FinishReason, began: float, nbytes: int, reused: int) -> Result:
        params, target = self._request.params, self._assembly.target
        assert params.seed is not None
        return Result(
            text="".join(self._shown),
            token_ids=tuple(self._tokens),
            passes=len(self._passes),
            seconds=time.perf_counter() - began,
            ttft_s=self._first,
            bytes_streamed=nbytes,
            peak_memory_bytes=process_memory.peak_bytes(),
            finish_reason=reason,
            draft=self._draft,
            budget=1 if self._decoding.mixture is None else self._decoding.policy.budget,
            seed=params.seed,
            draft_seconds=sum(done.draft_seconds for done in self._passes),
            target_seconds=sum(done.target_seconds for done in self._passes),
            prompt_tokens=len(self._request.ids),
            reused_tokens=reused,
            peak_device_bytes=devices.peak_bytes(target.device),
            guessed_by=total_guessed(done.guessed_by for done in self._passes),
        )


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
