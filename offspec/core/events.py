"""Events that an engine yields and a user interface renders. They hold no tensors."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

AcceptedBySource = tuple[tuple[str, int], ...]  # accepted draft tokens by name of the draft source
FinishReason = Literal["stop", "eos", "length", "context", "halted"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of work before the first token.

    Args:
        stage: Name of the work, for display.
        done: Finished amount, in `unit`.
        total: Total amount, in `unit`.
        unit: Unit of the amounts, "bytes" by default.
        detail: Current step, such as "layer 3 of 32", if `stage` does not include it; "" by default.
    """

    stage: str
    done: int
    total: int
    unit: Literal["bytes", "layers", "files", "tensors", "steps", "tokens", "texts", "answers"] = "bytes"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """One-line message for the user, such as a fallback, or a refused draft with the reason.

    urgent: whether something is lost unless the user acts. Urgent notices are shown even if others are
    hidden.
    """

    text: str
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress of the prefill. Sent before its first pass (layer 0) and again as layers complete.

    Args:
        tokens: New tokens of the prompt.
        reused: Tokens that were already in the KV cache.
        layer: Number of finished layers.
        layers: Number of layers of the target.
    """

    tokens: int
    reused: int
    layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class PassProgress:
    """Progress of a running pass. Sent only through `notify`.

    Args:
        index: Number of the pass, from 1.
        nodes: Nodes of the tree that the target verifies; 0 while the draft is still growing the tree.
        layer: Number of finished layers.
        layers: Number of layers of the target.
        bytes_streamed: Bytes streamed in this pass so far, as in `PassStats`.
        seconds: Time since the pass began.
    """

    index: int
    nodes: int
    layer: int
    layers: int
    bytes_streamed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token made final.

    Args:
        text: The text; never empty.
        source: "draft" for an accepted draft token, "bonus" for a token that the target added.
    """

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model for one token, before any rule or temperature.

    Args:
        token: Id of the chosen token.
        logprob: Its log-probability, in nats.
        top: (token, logprob) of the likeliest tokens, best first.
        text: Text of the token, with U+FFFD for bytes that are part of a character.
        top_text: Texts of the tokens in `top`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""
    top_text: tuple[str, ...] = ()

    def with_text(self, text_of: Callable[[int], str]) -> "TokenLogprobs":
        """Return a copy with the texts of its tokens."""
        texts = tuple(text_of(token) for token, _ in self.top)
        return replace(self, text=text_of(self.token), top_text=texts)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, in which the likeliest tokens are dicts with the same keys."""
        pairs = zip(self.top, self.top_text or [""] * len(self.top), strict=True)
        top = [{"token": token, "text": text, "logprob": logprob} for (token, logprob), text in pairs]
        return {"token": self.token, "text": self.text, "logprob": self.logprob, "top": top}


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is now final.

    Args:
        text: The text; may be empty.
        token_ids: Ids committed with the text; may be empty.
        pieces: The text, token by token.
        logprobs: Log-probabilities of each token, if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens. Sent before the first text if requested.

    Args:
        logprobs: One entry for each token of the prompt; None for the first.
    """

    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TreeSeen:
    """Verified tree of N nodes, for display; sent if a request asks for trees.

    Args:
        index: Number of the pass, from 1.
        parent: [N], parent of each node, -1 for the root.
        text: [N], text of each node's token.
        probability: [N], the draft's estimate that the target accepts the path up to the node.
        accepted: Accepted nodes, the root first.
        bonus: Text of the token that the target chose at the last accepted node; "" if the answer ends with a
            draft token.
    """

    index: int
    parent: tuple[int, ...]
    text: tuple[str, ...]
    probability: tuple[float, ...]
    accepted: tuple[int, ...]
    bonus: str


@dataclass(frozen=True, slots=True)
class PassStats:
    """Statistics of one pass of the target. Seconds are wall time.

    Args:
        index: Number of the pass, from 1.
        tree_nodes: Verified tree nodes.
        tree_depth: Levels below the root.
        draft_steps: Steps of the draft.
        emitted: Emitted tokens, bonus token included.
        draft_seconds: Time to grow the tree.
        target_seconds: Time of the target's forward pass.
        bytes_streamed: Bytes of weights copied to GPUs, or read from disk if the CPU computes with them.
        wait_seconds: Part of `target_seconds` spent waiting for weights.
        compute_seconds: Part of `target_seconds` spent computing layers.
        guessed_by: Accepted draft tokens of each source that had any.
        experts_asked: Experts that the rows were routed to, with on-demand expert loading.
        experts_read: Those experts that were not in memory.
        sequences: Sequences that shared the pass. Seconds, bytes and experts are totals of all of them.
        hidden_seconds: Time spent drafting the next tree during the target's pass, part of `target_seconds`.
        paused: Whether drafting was paused because passes without it are faster.
        bytes_read: Bytes of weights read from disk.
    """

    index: int
    tree_nodes: int
    tree_depth: int
    draft_steps: int
    emitted: int
    draft_seconds: float
    target_seconds: float
    bytes_streamed: int
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    guessed_by: AcceptedBySource = ()
    experts_asked: int = 0
    experts_read: int = 0
    sequences: int = 1
    hidden_seconds: float = 0.0
    paused: bool = False
    bytes_read: int = 0


def total_accepted(counts: Iterable[AcceptedBySource]) -> AcceptedBySource:
    """Sum the accepted tokens of each source, in descending order."""
    total = Counter[str]()
    for each in counts:
        total.update(dict(each))
    return tuple(total.most_common())


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Token that differs from decoding without speculation, found by `check`.

    Args:
        index: Position of the token in the answer.
        token: Id with speculation; None if that answer had ended.
        unspeculated_token: Id without speculation; None if that answer had ended.
        gap: Difference of the two best noisy logits there, in nats; a near-tie is close to 0.
    """

    index: int
    token: int | None
    unspeculated_token: int | None
    gap: float


@dataclass(frozen=True, slots=True)
class Result:
    """Finished answer. Also the object that `offspec generate --json` prints.

    Args:
        text: Text of the answer without special tokens. Bytes that are not UTF-8 become U+FFFD; complete
            characters next to them are kept.
        token_ids: Token ids of the answer.
        passes: Forward passes of the target.
        seconds: Wall time of the answer.
        ttft_s: Time to first token, in seconds.
        bytes_streamed: Bytes of weights copied to GPUs, or read from disk if the CPU computes with them.
        peak_memory_bytes: Peak resident memory of the process.
        finish_reason: "stop", "eos", "length", "context" or "halted".
        draft: Draft sources.
        budget: Maximum number of nodes verified in a pass.
        seed: Seed of the sampling.
        draft_seconds: Drafting time of all passes.
        target_seconds: Target time of all passes.
        prompt_tokens: Number of prompt tokens.
        reused_tokens: Number of prompt tokens found in the KV cache.
        peak_device_bytes: Peak memory of a CUDA device; 0 on a CPU.
        cpu_layers: Layers of the target that the CPU computed in addition to a GPU. In bfloat16 the tokens
            depend on this number.
        cpu_experts: Whether the CPU computed the routed experts in addition to a GPU. In bfloat16 the tokens
            depend on it.
        mismatches: Mismatches that `check` found; None if it was not requested.
        guessed_by: Accepted draft tokens of each source, in descending order.
        logprobs: Log-probabilities of each token, if requested.
        kv_cache: KV cache dtype: "model" or "int8", which changes answers.
        bytes_read: Bytes of weights read from disk.
        paused_passes: Passes in which drafting was paused because passes without it were faster.
        sampling: The temperature and, unless they have no effect, `top_p`, `top_k`, `min_p` and penalties, by
            name.
        prompt_logprobs: Log-probabilities of each prompt token, if requested; None for the first.
    """

    text: str
    token_ids: tuple[int, ...]
    passes: int
    seconds: float
    ttft_s: float
    bytes_streamed: int
    peak_memory_bytes: int
    finish_reason: FinishReason
    draft: str
    budget: int
    seed: int
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    peak_device_bytes: int = 0
    cpu_layers: int = 0
    cpu_experts: bool = False
    mismatches: tuple[Mismatch, ...] | None = field(default=None)
    guessed_by: AcceptedBySource = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    kv_cache: str = "model"
    bytes_read: int = 0
    paused_passes: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per pass, bonus tokens included."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict of the fields and the derived figures."""
        return {
            **asdict(self),
            "logprobs": _listed(self.logprobs),
            "prompt_logprobs": _listed(self.prompt_logprobs),
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens_per_pass,
            "tok_per_s": self.tok_per_s,
        }


def _listed(tokens: Iterable[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    return None if tokens is None else [None if token is None else token.to_json() for token in tokens]


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a stream."""

    result: Result


Event = (
    LoadProgress
    | Notice
    | Prefill
    | PassProgress
    | PromptLogprobs
    | TextDelta
    | TreeSeen
    | PassStats
    | Finished
)


def ignore_event(event: Event) -> None:
    """Ignore an event; the default of `notify`."""
