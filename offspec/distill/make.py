"""`distill_head`: text, training, measurement, files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from offspec.checkpoint import open_checkpoint
from offspec.core import memory as memories
from offspec.core.cache_dir import cache_root, claim_folder
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, RequestError, UnsupportedModelError
from offspec.core.events import Event, LoadProgress, Notice, unheard
from offspec.core.files import probe, writing
from offspec.core.private import tighten
from offspec.distill.config import Kind, TimeLimit, Wanted
from offspec.distill.eagle3 import Eagle3, published_taps
from offspec.distill.embed_head import Ends, take_ends
from offspec.distill.generate import LONGEST_QUESTION, write_taps, write_text
from offspec.distill.generate_batch import PIECE
from offspec.distill.medusa import Medusa
from offspec.distill.mlp import MLP
from offspec.distill.questions import own_questions, read_questions
from offspec.distill.store import Store, text_folder
from offspec.distill.student import Pupil
from offspec.distill.train import HeadAcceptance, Schedule, Trained, Training, measure_head
from offspec.model.loaded import LoadedModel
from offspec.plan.choose_device import choose_device
from offspec.plan.load import Assembly, assemble
from offspec.plan.model_sizes import imagine
from offspec_planners.units import format_bytes

Notify = Callable[[Event], None]
Dtype = Literal["bfloat16", "float32"]

_COMMON = 4096  # tokens of the vocabulary that a head learns to tell apart
_BLOCKS = 1  # of a Medusa head
_MINUTES = 8.0  # of training, where the whole run has no limit
_RATES: dict[Kind, float] = {"medusa": 3e-3, "mlp": 2e-3, "eagle3": 1e-3}  # of learning, at their highest
# What fits in memory: questions answered together, and rows learned from together.
_BATCHES = (128, 64, 32, 16, 8, 4, 2, 1)
_ROWS = (256, 128, 64)
_SHARE = 4  # one part in this many of memory is for sequences that are generated side by side
_WEIGHT = 16  # bytes of a weight in training: itself, its gradient, two averages
_COPIES = 5  # of a row's logits, for each depth, on the way forth and back; and for the target's own


@dataclass(frozen=True, slots=True)
class Distilled:
    """A head that was trained.

    `tokens` counts those of the target that it learned from, held-out ones included; `nbytes` those of its
    tensors; `seconds` the time of this run.
    """

    folder: Path
    kind: Kind
    tokens: int
    measured: HeadAcceptance
    trained: Trained
    nbytes: int
    seconds: float


def distill_head(
    wanted: Wanted,
    *,
    prompts: Path | None = None,
    memory: int | None = None,
    device: str = "auto",
    dtype: Dtype = "bfloat16",
    notify: Notify | None = None,
    limit: TimeLimit | None = None,
    cache_dir: Path | None = None,
) -> Distilled:
    """Train a draft head for a target, on answers of the target, and write it in the published format.

    After an interruption the same call resumes; the text is kept in the cache, and serves other heads of this
    target too.

    Args:
        wanted: The target, the kind of head and the bounds of training.
        prompts: A file of prompts; None: those that come with offspec.
        memory: Bytes of RAM that the process may use; None: what is free.
        device: "auto" by default, a usable GPU, else the CPU; "cpu"; or "cuda".
        dtype: Of the target's arithmetic, "bfloat16" by default.
        notify: Takes LoadProgress and Notice events.
        limit: Time for the run. None: `wanted.minutes` from now on.
        cache_dir: For text and states, instead of `OFFSPEC_CACHE` or `~/.cache/offspec`.

    Raises:
        RequestError: Something in `wanted` or the prompts.
        CapacityError: There is too little memory.
        DiskFullError: The disk filled up.
        CheckpointError: The target cannot be opened.
        UnsupportedModelError: Its layers carry a state from token to token.
    """
    limit, notify = limit or TimeLimit(wanted.minutes), notify or unheard
    device = choose_device(EngineConfig(wanted.model, memory=memory, device=device), notify).device
    questions = own_questions() if prompts is None else read_questions(prompts)
    given = memories.within_groups(memory, notify) if memory else memories.usable_bytes()
    tighten(notify, cache_dir)
    _claim_out(wanted.out)
    fingerprint = open_checkpoint(wanted.model, notify=notify).fingerprint
    asked = sha256("\n".join(questions).encode()).hexdigest()
    folder = text_folder(cache_root(cache_dir), fingerprint, asked, wanted.length, dtype)
    waiting = Notice("waiting for another process that works on the same text")
    with claim_folder(folder, lambda: notify(waiting)):
        batch, assembly = _open(wanted, given, device, dtype, notify)
        target = assembly.target
        try:
            hidden = int(target.skeleton.config.hidden_size)
            store = Store(folder, hidden, target.dtype.itemsize, notify)
            write_text(store, target, assembly.codec, questions, wanted, batch, limit, notify)
            taps = published_taps(len(target.layers)) if wanted.kind == "eagle3" else ()
            if taps:
                write_taps(store, target, taps, batch, notify)
            ends = take_ends(target, store.answers(store.training()), _COMMON)
        finally:
            target.close()
    config = target.skeleton.config
    del assembly, target
    memories.trim()
    with torch.enable_grad():
        return _teach(wanted, _pupil(wanted, ends, taps, config), store, ends, memory, limit, notify)


def _claim_out(out: Path) -> None:
    """See that a folder can be made there, before hours of work. Raises RequestError, CheckpointError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} is there already: name another folder with `out`, or remove it")
    with writing(out.parent, "name another folder with `out`"):
        out.parent.mkdir(parents=True, exist_ok=True)
        probe(out)


def _open(wanted: Wanted, given: int, device: str, dtype: Dtype, notify: Notify) -> tuple[int, Assembly]:
    """How many questions are answered at once, and the target, loaded into what memory is left.

    Raises any OffspecError.
    """
    outline, _ = imagine(wanted.model, getattr(torch, dtype), torch.device("cpu"))
    if outline.skeleton.rows.tail_numbers:
        family = outline.skeleton.config.model_type
        raise UnsupportedModelError(
            f"heads for {family} cannot be trained: answers are written many at a time, and its layers carry "
            "a state that is kept of one text only"
        )
    _check_training(wanted, outline, given)
    longest = min(LONGEST_QUESTION + wanted.length, outline.skeleton.context_length)
    batch, taken = questions_together(outline, longest, given)
    taken += outline.skeleton.vocab_size * int(outline.skeleton.config.hidden_size) * outline.dtype.itemsize
    outline.close()  # `taken` is for what is written together, and a copy of the head to learn with
    settings = EngineConfig(
        model=wanted.model,
        draft="none",
        budget=1,
        context=longest,
        memory=max(1, given - taken),
        device=device,
        dtype=dtype,
    )
    return batch, assemble(settings, notify)


def _check_training(wanted: Wanted, outline: LoadedModel, given: int) -> None:
    """Raise CapacityError where even the shortest lesson takes more than `given` bytes, before there is text.

    It is taken to have as many common tokens as there can be.
    """
    ends = Ends.imagined(outline.skeleton, outline.dtype, min(_COMMON, wanted.tokens))
    taps = published_taps(len(outline.layers)) if wanted.kind == "eagle3" else ()
    with torch.device("meta"):
        pupil = _pupil(wanted, ends, taps, outline.skeleton.config)
    needed = memories.resident_bytes() + ends.nbytes + _training_bytes(pupil, ends, _ROWS[-1])
    if needed > given:
        raise _too_little(needed, given, "raise `memory`, or train medusa heads of a small depth")


def _teach(
    wanted: Wanted,
    pupil: Pupil,
    store: Store,
    ends: Ends,
    memory: int | None,
    limit: TimeLimit,
    notify: Notify,
) -> Distilled:
    rows = rows_together(pupil, ends, memory)
    minutes = limit.training_minutes()
    schedule = Schedule(wanted.epochs, _MINUTES if minutes is None else minutes, rows, _RATES[wanted.kind])
    name = repr((wanted, rows, store.rows))
    state = store.folder / f"training-{sha256(name.encode()).hexdigest()[:16]}.pt"
    training = Training(pupil, store, ends, schedule, state, name)
    if training.resumed:
        notify(Notice("the training resumes where it was interrupted"))
    trained = training.run(
        lambda done, total, loss: notify(LoadProgress("training", done, total, "steps", loss))
    )
    numbers = store.held_out() or store.training()[-1:]
    measured = measure_head(
        pupil,
        store,
        numbers,
        ends.matrix.device,
        limit,
        lambda done: notify(LoadProgress("measuring on text held out", done, len(numbers), "texts")),
    )
    nbytes = pupil.published(wanted.model).write(wanted.out)
    state.unlink(missing_ok=True)
    return Distilled(wanted.out, wanted.kind, store.tokens, measured, trained, nbytes, limit.spent)


def _pupil(wanted: Wanted, ends: Ends, taps: Sequence[int], config: Any) -> Pupil:
    """config: of the target. Its first weights are the same in every run."""
    with torch.random.fork_rng(devices=()):  # and nobody else's random numbers change
        torch.default_generator.manual_seed(0)
        pupil: Pupil
        if wanted.kind == "medusa":
            pupil = Medusa(ends, wanted.depth, _BLOCKS)
        elif wanted.kind == "eagle3":
            pupil = Eagle3(ends, wanted.depth, taps, config)
        else:
            pupil = MLP(ends, wanted.depth, wanted.inner or ends.hidden_size)
    pupil.module.to(ends.matrix.device)
    return pupil


def questions_together(target: LoadedModel, longest: int, given: int) -> tuple[int, int]:
    """How many texts of at most `longest` tokens are written side by side, and the bytes they take.

    given: bytes of memory in all.
    """
    config, item = target.skeleton.config, target.dtype.itemsize
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    kept = longest * (2 * target.cache_bytes(1) + hidden * item)  # a cache is copied when sequences end
    each = kept + PIECE * (16 * hidden * item + 8 * heads * longest) + 12 * target.skeleton.vocab_size
    count = next((count for count in _BATCHES if count * each <= given // _SHARE), 1)
    return count, count * each


def rows_together(pupil: Pupil, ends: Ends, given: int | None) -> int:
    """Rows of a lesson, such that training stays within `given` bytes; None: of a machine with enough.

    Raises CapacityError where even the shortest lesson takes more.
    """
    if given is None:
        return _ROWS[0]
    for rows in _ROWS:
        needed = memories.resident_bytes() + _training_bytes(pupil, ends, rows)
        if needed <= given:
            return rows
    raise _too_little(needed, given, "raise `memory`; the text is kept")


def _training_bytes(pupil: Pupil, ends: Ends, rows: int) -> int:
    weights = sum(weight.numel() for weight in pupil.module.parameters())
    return _WEIGHT * weights + rows * _COPIES * (pupil.depth + 1) * 4 * len(ends.common)


def _too_little(needed: int, given: int, fix: str) -> CapacityError:
    sizes = f"{format_bytes(needed)} of memory, and {format_bytes(given)} are allowed"
    return CapacityError(f"training the head needs {sizes}: {fix}", needed=needed, given=given)
