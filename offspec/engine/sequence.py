"""Running requests: the events of each pass, and the final result."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from offspec.core import memory as process_memory
from offspec.core.config import SamplingParams
from offspec.core.events import (
    AcceptedBySource,
    Event,
    FinishReason,
    PassProgress,
    PassStats,
    Piece,
    Prefill,
    PromptLogprobs,
    Result,
    TextDelta,
    TokenLogprobs,
    TreeSeen,
    total_accepted,
)
from offspec.core.sampling_defaults import sampling_values
from offspec.engine.decode_state import DecodeState
from offspec.engine.detokenizer import TextStream
from offspec.engine.drafting import Drafting
from offspec.engine.request import ScheduledRequest
from offspec.engine.sequence_pass import DecodingConfig, PassResult, SequencePass
from offspec.model import devices
from offspec.model.pass_time import PassTime
from offspec.model.vocabulary import token_text
from offspec.plan.load import Assembly
from offspec.sampling.row_logprobs import PromptScorer
from offspec_planners.placement import Tier


@dataclass(frozen=True, slots=True)
class PassUsage:
    """Costs of a pass, for all its sequences.

    Args:
        sequences: Number of sequences.
        streamed: Bytes of weights streamed, as in `PassStats`.
        read: Bytes of weights read from disk, as in `PassStats`.
        layers: Time spent in layers.
        experts_asked: Number of experts requested.
        experts_read: Number of experts read.
    """

    sequences: int
    streamed: int
    read: int
    layers: PassTime
    experts_asked: int = 0
    experts_read: int = 0


class Halted(BaseException):
    """The answer was halted; raised where a pass can be cancelled.

    Not an `Exception`, like `asyncio.CancelledError`, so that handlers of failures do not catch it.
    """


class StopChecker:
    """Checks after each token whether the answer has ended, and why."""

    def __init__(self, params: SamplingParams, eos: frozenset[int], text: TextStream, room: int) -> None:
        """Create a checker for an answer without tokens.

        Args:
            params: Sampling parameters.
            eos: Tokens that end the answer as "eos".
            text: Text of the answer, which finds stop strings.
            room: Tokens until the context is full.
        """
        self._eos, self._text, self._max, self._room = eos, text, params.max_tokens, room
        self._stops = frozenset(params.stop_token_ids)
        self._count = 0
        self.reason: FinishReason | None = None

    @property
    def left(self) -> int:
        """Maximum number of further tokens."""
        return min(self._max, self._room) - self._count

    def after(self, token: int) -> bool:
        self._count += 1
        if token in self._eos:
            self.reason = "eos"
        elif token in self._stops or self._text.push(token):
            self.reason = "stop"
        elif self.left <= 0:
            self.reason = "length" if self._count >= self._max else "context"
        return self.reason is not None


class RunningSequence:
    """A running request with its text, draft sources and decoding state.

    Passes are run until `reason` is set; then `result` is available.

    Args:
        answer: The request, which also receives events.
        assembly: The loaded models.
        state: Token ids and caches; a prefix shared with the prompt is reused.
        drafting: Draft sources.
        notify: Receives notices.
    """

    def __init__(
        self,
        answer: ScheduledRequest,
        assembly: Assembly,
        state: DecodeState,
        drafting: Drafting,
        notify: Callable[[Event], None],
    ) -> None:
        self.error: BaseException | None = None  # set if a shared pass failed for this sequence only
        self.answer, self.state = answer, state
        request = self._request = answer.request
        self._assembly = assembly
        codec, params = assembly.codec, request.params
        self._text = TextStream(codec, params.stop, request.shown)
        ends = frozenset[int]() if params.ignore_eos else codec.eos_ids
        self._stop_checker = StopChecker(params, ends, self._text, assembly.context - len(request.ids))
        self._decoding = drafting.decoding(
            request,
            state.sources,
            stop=self._stop_checker.after,
            ends=ends.union(params.stop_token_ids),
            notify=notify,
        )
        self._draft = drafting.describe_sources(request.sources)
        self._decode_token = lru_cache(maxsize=4096)(lambda token: codec.decode_with_special([token]))
        self._token_text = lru_cache(maxsize=4096)(partial(token_text, codec.tokenizer))
        self._passes: list[PassStats] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_scorer: PromptScorer | None = None
        if params.prompt_logprobs is not None:
            self._prompt_scorer = PromptScorer(request.ids, params.prompt_logprobs)
        if request.fresh or self._prompt_scorer is not None:
            state.forget()
        self._shown: list[str] = []
        self._first = 0.0
        self._began = time.perf_counter()
        self._moved_before = assembly.target.bytes_moved
        reused = 0
        try:
            reused = state.begin(request.ids, self._check_halt)
        except Halted:
            self._stop_checker.reason = "halted"
        self.prefill = Prefill(len(request.ids) - reused, reused, 0, len(assembly.target.layers))

    @property
    def reason(self) -> FinishReason | None:
        """Reason why the answer has ended; None while it is running."""
        return self._stop_checker.reason

    def next_pass(self) -> SequencePass:
        """Return this sequence's part of the next pass."""
        return SequencePass(self.state, self._decoding, self._stop_checker.left - 1, self._prompt_scorer)

    @property
    def halted(self) -> bool:
        """Whether the answer was cancelled, so it must end with the text so far."""
        return self.answer.cancelled()

    def halt(self) -> list[Event]:
        """End the answer with the text so far; return its last events."""
        self._stop_checker.reason = "halted"
        return self.flush_text()

    def on_progress(self, layer: int, nodes: int, nbytes: int, seconds: float) -> None:
        """Report the current pass: layers done, nodes of the tree, bytes streamed and seconds so far."""
        index, layers = len(self._passes) + 1, self.prefill.layers
        if index == 1 and layer:
            self.answer.on_progress(Prefill(self.prefill.tokens, self.prefill.reused, layer, layers))
        self.answer.on_progress(PassProgress(index, nodes, layer, layers, nbytes, seconds))

    def process_pass(self, done: PassResult, spent: PassUsage) -> list[Event]:
        """Record a pass and return its events."""
        self._first = self._first or time.perf_counter() - self._began
        self._tokens += done.walk.tokens
        self.answer.gaps += done.walk.logit_gaps
        delta = self._delta(done)
        self._logprobs += delta.logprobs
        self._shown.append(delta.text)
        stats = self._stats(done, spent)
        self._passes.append(stats)
        events: list[Event] = [delta, stats]
        if self._request.trees:
            events.insert(1, describe_tree(len(self._passes), done, self._decode_token))
        if len(self._passes) == 1 and (scored := self._scored()) is not None:
            events.insert(0, PromptLogprobs(scored))
        return events

    def flush_text(self) -> list[Event]:
        """Return the held-back text of committed tokens, when no further tokens follow."""
        rest = "".join(self._text.finish())
        self._shown.append(rest)
        return [TextDelta(rest, (), (Piece(rest, "bonus"),))] if rest else []

    def _check_halt(self) -> None:
        if self.halted:
            raise Halted

    def _delta(self, done: PassResult) -> TextDelta:
        """Return the text of a pass by token; text held back until the end is added to the last token."""
        texts = self._text.finish() if self.reason else self._text.take()
        drafted = len(accepted(done)) - 1
        pieces = [Piece(text, "draft" if i < drafted else "bonus") for i, text in enumerate(texts) if text]
        logprobs = tuple(token.with_text(self._token_text) for token in done.walk.logprobs)
        return TextDelta("".join(texts), done.walk.tokens, tuple(pieces), logprobs)

    def _scored(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self._prompt_scorer is None:
            return None
        return tuple(token and token.with_text(self._token_text) for token in self._prompt_scorer.tokens)

    def _stats(self, done: PassResult, spent: PassUsage) -> PassStats:
        tree = done.grown.tree
        return PassStats(
            index=len(self._passes) + 1,
            tree_nodes=len(tree),
            tree_depth=int(tree.depth.max()),
            draft_steps=done.grown.steps,
            emitted=len(done.walk.tokens),
            draft_seconds=done.draft_seconds,
            target_seconds=done.target_seconds,
            bytes_streamed=spent.streamed,
            wait_seconds=spent.layers.waited,
            compute_seconds=spent.layers.computed,
            guessed_by=accepted_by_source(done, self._decoding),
            experts_asked=spent.experts_asked,
            experts_read=spent.experts_read,
            sequences=spent.sequences,
            hidden_seconds=done.hidden_seconds,
            bytes_read=spent.read,
            paused=done.paused,
        )

    @property
    def result(self) -> Result:
        """Result of the request, once `reason` is set."""
        params, target = self._request.params, self._assembly.target
        assert params.seed is not None and self.reason is not None
        moved = target.bytes_moved.since(self._moved_before)
        return Result(
            text="".join(self._shown),
            token_ids=tuple(self._tokens),
            passes=len(self._passes),
            seconds=time.perf_counter() - self._began,
            ttft_s=self._first,
            bytes_streamed=moved.streamed,
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
            cpu_experts=self._assembly.placement.cpu_experts,
            guessed_by=total_accepted(done.guessed_by for done in self._passes),
            logprobs=None if params.logprobs is None else tuple(self._logprobs),
            kv_cache="int8" if target.int8_cache else "model",
            bytes_read=moved.read,
            paused_passes=sum(done.paused for done in self._passes),
            sampling=sampling_values(params),
            prompt_logprobs=self._scored(),
        )


def accepted(done: PassResult) -> tuple[int, ...]:
    """Return the accepted nodes, root first, including a drafted token that ends the answer."""
    walk = done.walk
    last = done.grown.tree.children(walk.nodes[-1]).get(walk.tokens[-1])
    return walk.nodes if last is None else (*walk.nodes, last)


def accepted_by_source(done: PassResult, decoding: DecodingConfig) -> AcceptedBySource:
    """Return the numbers of accepted tokens by source, without zeros.

    A token counts for the source that gave it the highest probability.
    """
    names = (*decoding.mixture.names, "format") if decoding.mixture is not None else ()
    counts = np.bincount(done.grown.tree.source[list(accepted(done)[1:])]).tolist()
    return tuple((name, count) for name, count in zip(names, counts, strict=False) if count)


def describe_tree(index: int, done: PassResult, decode_with_special: Callable[[int], str]) -> TreeSeen:
    """Return the tree of pass number `index` with decoded tokens and the accepted path."""
    tree, path = done.grown.tree, accepted(done)
    return TreeSeen(
        index=index,
        parent=tuple(tree.parent.tolist()),
        text=tuple(decode_with_special(token) for token in tree.token.tolist()),
        probability=tuple(np.exp(tree.score).tolist()),
        accepted=path,
        bonus=decode_with_special(done.walk.tokens[-1]) if path == done.walk.nodes else "",
    )
