"""The events that an engine yields and a user interface renders. They hold no tensors."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Guessed = tuple[tuple[str, int], ...]  # tokens by the name of the source that guessed them
FinishReason = Literal["stop", "eos", "length", "context", "halted"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Work before the first token: `stage` is a phrase for the user; done and total in `unit`.

    detail: where it is at, such as "layer 3 of 32", where the stage as a whole does not say.
    """

    stage: str
    done: int
    total: int
    unit: Literal["bytes", "layers", "files", "tensors", "steps", "tokens", "texts"] = "bytes"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """One line that the user should know: a fallback taken, a draft refused and why."""

    text: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is on its way through the target: `tokens` new ones, `reused` already in the cache.

    Sent once before the first pass (layer 0) and again as layers of that pass complete.
    """

    tokens: int
    reused: int
    layer: int
    layers: int


@dataclass(frozen=True, slots=True)
class PassProgress:
    """Where a pass is. Told through `notify` alone, while the pass runs.

    index: from 1. nodes: of the tree on its way through the target, 0 while the draft still grows it; layer:
    those done, of `layers`; bytes_streamed: in this pass; seconds: since it began.
    """

    index: int
    nodes: int
    layer: int
    layers: int
    bytes_streamed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token made final. source: "draft", or "bonus" for what the target added itself."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is now final, and the token ids committed with it (either may be empty).

    pieces: the same text, token by token.
    """

    text: str
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeSeen:
    """A verified tree of N nodes, for people to look at; sent where a request asks for trees.

    index: the pass, from 1. parent [N], -1 for the root; text [N] of each node's token; probability [N] that
    the target takes the path so far, as the draft saw it; accepted: the nodes of the walk, the root first;
    bonus: the text of the token that the target chose at the last of them, "" where an answer ends with one
    that was guessed.
    """

    index: int
    parent: tuple[int, ...]
    text: tuple[str, ...]
    probability: tuple[float, ...]
    accepted: tuple[int, ...]
    bonus: str


@dataclass(frozen=True, slots=True)
class PassStats:
    """One trip of the target's weights. Seconds are wall time; `emitted` counts the bonus token.

    Of target_seconds, wait_seconds passed in waiting for weights and compute_seconds in layers. guessed_by:
    the accepted tokens of each source that had any; the rest of `emitted` is the bonus.
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


def total_guessed(counts: Iterable[Guessed]) -> Guessed:
    """Accepted tokens of each source, added up, most first."""
    total = Counter[str]()
    for each in counts:
        total.update(dict(each))
    return tuple(total.most_common())


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where `check` found that decoding without speculation chose another token.

    gap: how far apart the two best noisy logits were there, in nats; a near-tie is close to 0.
    """

    index: int
    token: int
    unspeculated_token: int
    gap: float


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer. Also the object that `offspec generate --json` prints."""

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
    mismatches: tuple[Mismatch, ...] | None = field(default=None)  # None: not checked
    guessed_by: Guessed = ()  # accepted tokens of each source, most first

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
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens_per_pass,
            "tok_per_s": self.tok_per_s,
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream."""

    result: Result


Event = LoadProgress | Notice | Prefill | PassProgress | TextDelta | TreeSeen | PassStats | Finished


def unheard(event: Event) -> None:
    """Ignores an event: the default of `notify`."""
