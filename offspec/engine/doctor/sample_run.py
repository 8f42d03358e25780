"""Check with the embedded model: stream and speculate on every device, compare with plain decoding."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offspec.core.errors import CapacityError, ModelNotFoundError, OffspecError
from offspec.core.events import Event, Notice, Result
from offspec.engine.doctor.finding import DoctorOptions, Figure, Finding
from offspec.engine.doctor.worker import REPORT, cause_of

if TYPE_CHECKING:
    from offspec.engine.engine import Engine

# The two best tokens always differ by at least 0.2 nats, so float32 rounding cannot change the choice.
_PROMPT = "Count from one to ten."
_TOKENS = 16
_ROOM = 1.05  # factor on the model's minimum memory, so that most weights are streamed


def check(options: DoctorOptions) -> Iterator[Finding]:
    """Yield a finding for the CPU, then one for each GPU, which must emit the same tokens."""
    from offspec.checkpoint.open import embedded_model

    part = "sample run, cpu"
    try:
        embedded_model()
    except ModelNotFoundError as error:
        missing, _, remedy = str(error).partition(": ")
        yield Finding(part, "absent", f"skipped: {missing}", remedy)
        return
    try:
        first = _answer("cpu")
    except Exception as error:
        yield _broken(part, error)
        return
    yield _judged(part, first, None)
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        part = f"sample run, GPU {index}"
        try:
            yield _judged(part, _answer(f"cuda:{index}"), first)
        except Exception as error:
            yield _broken(part, error)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer, the load time, and the notices."""

    result: Result
    load_seconds: float
    notices: tuple[str, ...]


def _answer(device: str) -> _Answer:
    """Generate an answer in float32 with little memory, and decode it again without speculation."""
    from offspec.core.config import SamplingParams

    notices, began = list[str](), time.perf_counter()

    def collect(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    with _loaded(device, collect) as engine:
        load_seconds = time.perf_counter() - began
        result = engine.generate(_PROMPT, SamplingParams(max_tokens=_TOKENS), check=True)
    return _Answer(result, load_seconds, tuple(notices))


def _loaded(device: str, notify: Callable[[Event], None]) -> "Engine":
    """Load the embedded model with little more than its minimum VRAM, or RAM on the CPU."""
    from offspec.checkpoint.open import DEMO
    from offspec.core.config import EngineConfig
    from offspec.engine.load import load

    def within(nbytes: int) -> EngineConfig:
        return EngineConfig(
            DEMO,
            draft="lookup",
            budget=8,
            width=4,
            context=128,
            dtype="float32",
            device=device,
            learn=False,
            memory=nbytes if device == "cpu" else None,
            vram=None if device == "cpu" else nbytes,
        )

    try:
        return load(within(1), notify=notify)
    except CapacityError as error:
        return load(within(int(_ROOM * error.needed)), notify=notify)


def _judged(part: str, answer: _Answer, first: _Answer | None) -> Finding:
    """Compare an answer with plain decoding, and with the CPU's answer (`first`)."""
    result = answer.result
    figures: dict[str, Figure] = {
        "tokens": result.tokens,
        "tok_per_s": round(result.tok_per_s, 2),
        "load_seconds": round(answer.load_seconds, 2),
        "streamed": result.bytes_streamed,
        "read": result.bytes_read,
        "ids": " ".join(map(str, result.token_ids)),
        "notices": "; ".join(answer.notices),
    }
    if result.mismatches:
        first_one = result.mismatches[0]
        found = f"token {first_one.index} differs from plain decoding (gap {first_one.gap:.3g} nats)"
        return Finding(part, "failed", found, REPORT, figures)
    if first is not None and result.token_ids != first.result.token_ids:
        place = _first_difference(result.token_ids, first.result.token_ids)
        return Finding(part, "failed", f"token {place} differs from the CPU's", REPORT, figures)
    same = "equal to plain decoding" if first is None else "equal to the CPU's"
    found = f"{result.tokens} tokens, {same}, at {result.tok_per_s:.1f} tok/s"
    return Finding(part, "ok", found, figures=figures)


def _first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _broken(part: str, error: Exception) -> Finding:
    """Return a finding for an error; offspec's own errors include their remedy."""
    if isinstance(error, OffspecError):
        return Finding(part, "failed", " ".join(str(error).split()))
    return Finding(part, "failed", cause_of(error), REPORT)
