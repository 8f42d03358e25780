"""The events that an engine yields and a user interface renders. They hold no tensors."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Guessed = tuple[tuple[str, int], ...]  # tokens by the name of the source that guessed them
FinishReason = Literal["stop", "eos", "length", "context", "halted"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Work before the first token.

    Args:
        stage: A phrase for the user.
        done: How much of it is done, in `unit`.
        total: How much there is, in `unit`.
        unit: What is counted, "bytes" by default.
        detail: What is under way, such as "layer 3 of 32", where `stage` does not say; "" by default.
    """

    stage: str
    done: int
    total: int
    unit: Literal["bytes", "layers", "files", "tensors", "steps", "tokens", "texts", "answers"] = "bytes"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """One line that the user should know: a fallback taken, a draft refused and why.

    urgent: something is lost unless the user acts; told where other notices are not wanted, too.
    """

    text: str
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is being computed. Sent before the first pass (layer 0) and again as its layers complete.

    Args:
        tokens: New tokens of the prompt.
        reused: Tokens that the cache already held.
        layer: Layers done.
        layers: Layers of the target.
    """

    tokens: int
    reused: int
    layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class PassProgress:
    """Where a pass is. Sent through `notify` alone, while the pass runs.

    Args:
        index: Of the pass, from 1.
        nodes: Of the tree that the target verifies; 0 while the draft still grows it.
        layer: Layers done.
        layers: Layers of the target.
        bytes_streamed: In this pass, as in `PassStats`.
        seconds: Since the pass began.
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
        text: Not empty.
        source: "draft" for an accepted draft token, "bonus" for what the target added.
    """

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model itself says of one token, before any rule or temperature.

    Args:
        token: The chosen one.
        logprob: Of that, in nats.
        top: (token, logprob) of the likeliest, best first.
        text: Text of the token; U+FFFD stands for bytes that are part of a character.
        top_text: Texts of `top`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""
    top_text: tuple[str, ...] = ()

    def with_text(self, text_of: Callable[[int], str]) -> "TokenLogprobs":
        """Copy with the texts of its tokens."""
        texts = tuple(text_of(token) for token, _ in self.top)
        return replace(self, text=text_of(self.token), top_text=texts)

    def to_json(self) -> dict[str, Any]:
        """A plain dict; the likeliest tokens are dicts with the same keys."""
        pairs = zip(self.top, self.top_text or [""] * len(self.top), strict=True)
        top = [{"token": token, "text": text, "logprob": logprob} for (token, logprob), text in pairs]
        return {"token": self.token, "text": self.text, "logprob": self.logprob, "top": top}


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is now final.

    Args:
        text: May be empty.
        token_ids: Ids committed with it; may be empty.
        pieces: The same text, token by token.
        logprobs: Of each token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens. Sent before the first text where a request asks for them.

    Args:
        logprobs: One for each token of the prompt; None for the first.
    """

    logprobs: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class TreeSeen:
    """A verified tree of N nodes, for display; sent where a request asks for trees.

    Args:
        index: Of the pass, from 1.
        parent: [N], -1 for the root.
        text: [N], of each node's token.
        probability: [N], that the target takes the path so far, as the draft estimated it.
        accepted: Nodes of the walk, the root first.
        bonus: Text of the token that the target chose at the last of them; "" where the answer ends with a
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
    """One trip of the target's weights. Seconds are wall time.

    Args:
        index: Of the pass, from 1.
        tree_nodes: Verified.
        tree_depth: Levels below the root.
        draft_steps: Steps of the draft.
        emitted: Tokens of the answer, the bonus token included.
        draft_seconds: Growing the tree.
        target_seconds: The target's pass.
        bytes_streamed: Bytes of weights copied to GPUs, or read from disk where the CPU computes with them.
        wait_seconds: Of `target_seconds`, waiting for weights.
        compute_seconds: Of `target_seconds`, computing layers.
        guessed_by: Accepted tokens of each source that had any.
        experts_asked: Experts that its rows were sent to, where those are read when they are asked for.
        experts_read: Of those that were not in memory.
        sequences: That shared the pass, whose seconds, bytes and experts are those of all.
        hidden_seconds: Drafting for the next tree beside the target's pass, within `target_seconds`.
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
    guessed_by: Guessed = ()
    experts_asked: int = 0
    experts_read: int = 0
    sequences: int = 1
    hidden_seconds: float = 0.0
    paused: bool = False
    bytes_read: int = 0


def total_guessed(counts: Iterable[Guessed]) -> Guessed:
    """Accepted tokens of each source, added up, most first."""
    total = Counter[str]()
    for each in counts:
        total.update(dict(each))
    return tuple(total.most_common())


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where `check` found that decoding without speculation chose another token.

    Args:
        index: Of the token in the answer.
        token: The id with speculation; None where that answer had ended.
        unspeculated_token: The id without; None where that answer had ended.
        gap: Between the two best noisy logits there, in nats; a near-tie is close to 0.
    """

    index: int
    token: int | None
    unspeculated_token: int | None
    gap: float


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer. Also the object that `offspec generate --json` prints.

    Args:
        text: The answer, special tokens left out. Bytes that are not UTF-8 are U+FFFD, and whole characters
            next to them stay.
        token_ids: Its tokens.
        passes: Trips of the target's weights.
        seconds: Wall time of the answer.
        ttft_s: Seconds to the first token.
        bytes_streamed: Bytes of weights copied to GPUs, or read from disk where the CPU computes with them.
        peak_memory_bytes: Of the process.
        finish_reason: "stop", "eos", "length", "context" or "halted".
        draft: The draft sources.
        budget: Most nodes verified in a pass.
        seed: That the tokens were sampled with.
        draft_seconds: Of all passes.
        target_seconds: Of all passes.
        prompt_tokens: Of the prompt.
        reused_tokens: Of those, found in the cache.
        peak_device_bytes: Memory of a CUDA device; 0 on a CPU.
        cpu_layers: Layers of the target that the CPU computed beside a GPU. In bfloat16 the tokens depend on
            this number.
        cpu_experts: Whether the CPU computed its routed experts beside a GPU; tokens depend on it likewise.
        mismatches: What `check` found; None where it was not asked for.
        guessed_by: Accepted tokens of each source, most first.
        kv_cache: How keys and values were kept: "model" or "int8", which changes answers.
        bytes_read: Bytes of weights read from disk.
        paused_passes: Passes in which drafting was paused because passes without it were faster.
        sampling: The temperature and, unless they have no effect, `top_p`, `top_k`, `min_p` and penalties, by
            name.
        prompt_logprobs: Of each token of the prompt, where they were asked for; None for the first.
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
    peak_device_bytes: int = 0  # memory of a CUDA device; 0 on a CPU
    cpu_layers: int = 0  # computed by the CPU beside a GPU
    cpu_experts: bool = False
    mismatches: tuple[Mismatch, ...] | None = field(default=None)  # None: not checked
    guessed_by: Guessed = ()  # accepted tokens of each source, most first
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each token, where they were asked for
    kv_cache: str = "model"
    bytes_read: int = 0  # from disk
    paused_passes: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens (bonus included) for each trip of the weights."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the fields and the derived figures."""
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
    """The last event of a stream."""

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


def unheard(event: Event) -> None:
    """Ignores an event: the default of `notify`."""
