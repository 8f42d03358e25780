"""`distill_head`: generates text, trains a head, measures it, and writes its files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from offspec.checkpoint import open_checkpoint
from offspec.core import memory as process_memory
from offspec.core.cache_dir import cache_root, lock_folder
from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, RequestError, UnsupportedModelError
from offspec.core.events import Event, LoadProgress, Notice, ignore_event
from offspec.core.files import as_write_error, probe_writable
from offspec.core.private_folders import restrict_permissions
from offspec.distill.config import DistillConfig, Kind, TimeLimit
from offspec.distill.eagle3 import Eagle3Student, published_taps
from offspec.distill.embed_head import EmbeddingAndHead, take_embedding_and_head
from offspec.distill.generate import LONGEST_QUESTION, write_taps, write_text
from offspec.distill.generate_batch import PROMPT_CHUNK
from offspec.distill.medusa import MedusaStudent
from offspec.distill.mlp import MLPStudent
from offspec.distill.prompts import builtin_questions, read_prompts
from offspec.distill.store import Store, text_folder
from offspec.distill.student import Student
from offspec.distill.train import HeadAcceptance, Schedule, Training, TrainingResult, measure_head
from offspec.model.loaded import LoadedModel
from offspec.plan.choose_device import choose_device
from offspec.plan.load import Assembly, open_and_load
from offspec.plan.model_sizes import open_on_meta
from offspec_planners.units import format_bytes

Notify = Callable[[Event], None]
Dtype = Literal["bfloat16", "float32"]

_COMMON = 4096  # tokens of the vocabulary with outputs of their own
_BLOCKS = 1  # blocks of a Medusa head
_MINUTES = 8.0  # of training, if the run has no time limit
_RATES: dict[Kind, float] = {"medusa": 3e-3, "mlp": 2e-3, "eagle3": 1e-3}  # highest learning rates
# Batch sizes that are tried until memory suffices: questions per batch, and rows per training batch.
_BATCHES = (128, 64, 32, 16, 8, 4, 2, 1)
_ROWS = (256, 128, 64)
_SHARE = 4  # 1 / share of memory for the sequences of a batch
_WEIGHT = 16  # bytes per trained weight: value, gradient, two averages
_COPIES = 5  # copies of a row's logits, forward and backward, for each depth and for the target's own


@dataclass(frozen=True, slots=True)
class DistillResult:
    """A trained head.

    Args:
        folder: Folder of the head.
        kind: Kind of head.
        tokens: Tokens of the target's text, including held-out ones.
        measured: Acceptance on held-out text.
        trained: Result of training.
        nbytes: Bytes of the head's tensors.
        seconds: Time of this run.
    """

    folder: Path
    kind: Kind
    tokens: int
    measured: HeadAcceptance
    trained: TrainingResult
    nbytes: int
    seconds: float


def distill_head(
    wanted: DistillConfig,
    *,
    prompts: Path | None = None,
    memory: int | None = None,
    device: str = "auto",
    dtype: Dtype = "bfloat16",
    notify: Notify | None = None,
    limit: TimeLimit | None = None,
    cache_dir: Path | None = None,
) -> DistillResult:
    """Train a draft head for a target, on answers of the target, and write it in the published format.

    After an interruption the same call resumes. The text is kept in the cache and reused for other heads of
    this target.

    Args:
        wanted: The target, the kind of head and the limits of training.
        prompts: File of prompts; None: offspec's own prompts.
        memory: Bytes of RAM that the process may use; None: all free RAM.
        device: "auto" by default, a usable GPU, else the CPU; "cpu"; or "cuda".
        dtype: Dtype of the target's arithmetic, "bfloat16" by default.
        notify: Receives LoadProgress and Notice events.
        limit: Time limit of the run. None: `wanted.minutes` from now on.
        cache_dir: Cache for text and states, instead of `OFFSPEC_CACHE` or `~/.cache/offspec`.

    Raises:
        RequestError: An invalid value in `wanted`, or invalid prompts.
        CapacityError: There is too little memory.
        DiskFullError: The disk filled up.
        CheckpointError: The target cannot be opened.
        UnsupportedModelError: The target has recurrent layers.
    """
    limit, notify = limit or TimeLimit(wanted.minutes), notify or ignore_event
    device = choose_device(EngineConfig(wanted.model, memory=memory, device=device), notify).device
    questions = builtin_questions() if prompts is None else read_prompts(prompts)
    given = process_memory.limit_to_cgroup(memory, notify) if memory else process_memory.usable_bytes()
    restrict_permissions(notify, cache_dir)
    _check_out(wanted.out)
    fingerprint = open_checkpoint(wanted.model, notify=notify).fingerprint
    asked = sha256("\n".join(questions).encode()).hexdigest()
    folder = text_folder(cache_root(cache_dir), fingerprint, asked, wanted.length, dtype)
    waiting = Notice("waiting for another process that is using the same text")
    with lock_folder(folder, lambda: notify(waiting)):
        batch, assembly = _open(wanted, given, device, dtype, notify)
        target = assembly.target
        try:
            hidden = int(target.skeleton.config.hidden_size)
            store = Store(folder, hidden, target.dtype.itemsize, notify)
            write_text(store, target, assembly.codec, questions, wanted, batch, limit, notify)
            taps = published_taps(len(target.layers)) if wanted.kind == "eagle3" else ()
            if taps:
                write_taps(store, target, taps, batch, notify)
            embed_head = take_embedding_and_head(target, store.answers(store.training()), _COMMON)
        finally:
            target.close()
    config = target.skeleton.config
    del assembly, target
    process_memory.malloc_trim()
    with torch.enable_grad():
        return _train_and_write(
            wanted, _make_student(wanted, embed_head, taps, config), store, embed_head, memory, limit, notify
        )


def _check_out(out: Path) -> None:
    """Check, before hours of work, that the folder can be created. Raises RequestError, CheckpointError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists already: name another folder with `out`, or remove it")
    with as_write_error(out.parent, "name another folder with `out`"):
        out.parent.mkdir(parents=True, exist_ok=True)
        probe_writable(out)


def _open(
    wanted: DistillConfig, given: int, device: str, dtype: Dtype, notify: Notify
) -> tuple[int, Assembly]:
    """Return the number of questions per batch, and the target, loaded into the remaining memory.

    Raises any OffspecError.
    """
    outline, _ = open_on_meta(wanted.model, getattr(torch, dtype), torch.device("cpu"))
    if outline.skeleton.rows.tail_numbers:
        family = outline.skeleton.config.model_type
        raise UnsupportedModelError(
            f"heads for {family} cannot be trained: answers are generated in batches, but its recurrent "
            "layers keep the state of only one text"
        )
    _check_training(wanted, outline, given)
    longest = min(LONGEST_QUESTION + wanted.length, outline.skeleton.context_length)
    batch, taken = questions_per_batch(outline, longest, given)
    taken += outline.skeleton.vocab_size * int(outline.skeleton.config.hidden_size) * outline.dtype.itemsize
    outline.close()  # `taken` is for the batch of sequences, and for a copy of the head to train with
    settings = EngineConfig(
        model=wanted.model,
        draft="none",
        budget=1,
        context=longest,
        memory=max(1, given - taken),
        device=device,
        dtype=dtype,
    )
    try:
        return batch, open_and_load(settings, notify)
    except CapacityError as error:
        if error.given != settings.memory:  # device memory, which has no option here
            raise _too_little(error.needed, error.given, 'use `device="cpu"`') from error
        raise _too_little(error.needed + taken, given, "raise `memory`") from error


def _check_training(wanted: DistillConfig, outline: LoadedModel, given: int) -> None:
    """Raise CapacityError if even the smallest training batch takes more than `given` bytes.

    This is checked before there is text, so the maximum number of common tokens is assumed.
    """
    embed_head = EmbeddingAndHead.placeholder(outline.skeleton, outline.dtype, min(_COMMON, wanted.tokens))
    taps = published_taps(len(outline.layers)) if wanted.kind == "eagle3" else ()
    with torch.device("meta"):
        student = _make_student(wanted, embed_head, taps, outline.skeleton.config)
    needed = (
        process_memory.resident_bytes() + embed_head.nbytes + _training_bytes(student, embed_head, _ROWS[-1])
    )
    if needed > given:
        raise _too_little(needed, given, "raise `memory`, or train medusa heads of a small depth")


def _train_and_write(
    wanted: DistillConfig,
    student: Student,
    store: Store,
    embed_head: EmbeddingAndHead,
    memory: int | None,
    limit: TimeLimit,
    notify: Notify,
) -> DistillResult:
    rows = rows_per_batch(student, embed_head, memory)
    minutes = limit.training_minutes()
    schedule = Schedule(wanted.epochs, _MINUTES if minutes is None else minutes, rows, _RATES[wanted.kind])
    name = repr((wanted, rows, store.rows))
    state = store.folder / f"training-{sha256(name.encode()).hexdigest()[:16]}.pt"
    training = Training(student, store, embed_head, schedule, state, name)
    if training.resumed:
        notify(Notice("the training resumes where it was interrupted"))
    trained = training.run(
        lambda done, total, loss: notify(LoadProgress("training", done, total, "steps", loss))
    )
    numbers = store.held_out() or store.training()[-1:]
    measured = measure_head(
        student,
        store,
        numbers,
        embed_head.matrix.device,
        limit,
        lambda done: notify(LoadProgress("measuring on held-out text", done, len(numbers), "texts")),
    )
    nbytes = student.to_checkpoint(wanted.model).write(wanted.out)
    state.unlink(missing_ok=True)
    return DistillResult(wanted.out, wanted.kind, store.tokens, measured, trained, nbytes, limit.spent)


def _make_student(
    wanted: DistillConfig, embed_head: EmbeddingAndHead, taps: Sequence[int], config: Any
) -> Student:
    """Return an untrained head. config: the target's. Initial weights are the same in every run."""
    with torch.random.fork_rng(devices=()):  # leave the caller's random state unchanged
        torch.default_generator.manual_seed(0)
        student: Student
        if wanted.kind == "medusa":
            student = MedusaStudent(embed_head, wanted.depth, _BLOCKS)
        elif wanted.kind == "eagle3":
            student = Eagle3Student(embed_head, wanted.depth, taps, config)
        else:
            student = MLPStudent(embed_head, wanted.depth, wanted.inner or embed_head.hidden_size)
    student.module.to(embed_head.matrix.device)
    return student


def questions_per_batch(target: LoadedModel, longest: int, given: int) -> tuple[int, int]:
    """Return the number of texts of at most `longest` tokens per batch, and the bytes they take.

    given: total bytes of memory.
    """
    config, item = target.skeleton.config, target.dtype.itemsize
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    kept = longest * (2 * target.cache_bytes(1) + hidden * item)  # caches are copied when sequences end
    each = kept + PROMPT_CHUNK * (16 * hidden * item + 8 * heads * longest) + 12 * target.skeleton.vocab_size
    count = next((count for count in _BATCHES if count * each <= given // _SHARE), 1)
    return count, count * each


def rows_per_batch(student: Student, embed_head: EmbeddingAndHead, given: int | None) -> int:
    """Return the rows of a training batch that fit in `given` bytes; the maximum if None.

    Raises CapacityError if even the smallest batch takes more.
    """
    if given is None:
        return _ROWS[0]
    for rows in _ROWS:
        needed = process_memory.resident_bytes() + _training_bytes(student, embed_head, rows)
        if needed <= given:
            return rows
    raise _too_little(needed, given, "raise `memory`; the text is kept")


def _training_bytes(student: Student, embed_head: EmbeddingAndHead, rows: int) -> int:
    weights = sum(weight.numel() for weight in student.module.parameters())
    return _WEIGHT * weights + rows * _COPIES * (student.depth + 1) * 4 * len(embed_head.common)


def _too_little(needed: int, given: int, fix: str) -> CapacityError:
    sizes = f"{format_bytes(needed)} of memory, but only {format_bytes(given)} are allowed"
    return CapacityError(f"training the head needs {sizes}: {fix}", needed=needed, given=given)
