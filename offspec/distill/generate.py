"""Having the target answer questions, batch by batch, until there is text enough.

EAGLE-3 alone wants what enters some of the layers, too: a second pass over the text keeps that beside it.

Letters: B passages, n tokens of one, H hidden size.
"""

import math
from collections.abc import Callable, Sequence

import torch

from offspec.core import memory
from offspec.core.errors import RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.distill.batched_forward import Batch
from offspec.distill.config import LEAST_TOKENS, TimeLimit, Wanted
from offspec.distill.generate_batch import PIECE, Question, answer
from offspec.distill.questions import rounds
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec
from offspec_planners.units import format_bytes, format_seconds

LONGEST_QUESTION = 512  # tokens; what is longer is left out

_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of answers, in turn
_BATCH_IN_TIME = 32  # most questions at a time if there is a limit: the first pass reads all of them
_AGAIN = 0.8  # of an answer to a question that was answered greedily before


def write_text(
    store: Store,
    target: LoadedModel,
    codec: TextCodec,
    questions: Sequence[str],
    wanted: Wanted,
    batch: int,
    limit: TimeLimit,
    notify: Callable[[Event], None],
) -> None:
    """Answers to `batch` questions at a time, each kept as it is complete, beside those that are there.

    Raises RequestError where no question is short enough, or the time for too little text; DiskFullError.
    """
    missing = wanted.tokens - store.tokens
    if store.tokens:
        notify(Notice(f"{min(store.tokens, wanted.tokens)} tokens of text were written before and are kept"))
    if missing <= 0:
        return
    store.require(missing)
    size = format_bytes(missing * store.bytes_per_token)
    notify(Notice(f"{missing} tokens of text with their states take about {size} in {store.folder}"))
    asked = _short(codec, questions)
    stage = f"{wanted.model} writes text"
    limit.begin_text()
    batch = batch if limit.minutes is None else min(batch, _BATCH_IN_TIME)
    began, steps, first = limit.spent, 0, 0.0
    while store.tokens < wanted.tokens and not (steps and limit.text_is_due):
        before = store.tokens

        def step(count: int, before: int = before) -> bool:
            nonlocal steps, first
            steps, first = steps + 1, first or limit.spent
            done = min(before + count, wanted.tokens)
            notify(LoadProgress(stage, done, wanted.tokens, "tokens"))
            return limit.text_is_due

        chosen = [_question(asked, store.passages + at) for at in range(batch)]
        chosen.sort(key=lambda question: len(question.ids))  # so that they begin to be answered together
        seed = store.passages
        if passages := answer(target, chosen, wanted.length, codec.eos_ids, seed=seed, step=step):
            store.add(passages)
        memory.trim()  # what a batch took is given back before the next is begun
    if store.tokens < LEAST_TOKENS:
        seconds = (limit.spent - first) / (steps - 1) if steps > 1 else first - began
        raise RequestError(_too_short(limit, began, seconds, chosen))
    if store.tokens < wanted.tokens:
        notify(Notice(f"the time is up for text: {store.tokens} of {wanted.tokens} tokens are used"))


def _too_short(limit: TimeLimit, began: float, step: float, chosen: Sequence[Question]) -> str:
    """Why there is too little text, and the time that would do.

    Args:
        limit: The time that was given.
        began: Seconds before the text was begun.
        step: Seconds of a pass.
        chosen: Questions that are answered together, the shortest first.
    """
    passes = len(chosen[-1].ids) - len(chosen[0].ids) + math.ceil(LEAST_TOKENS / len(chosen))
    needed = (began + 2 * passes * step) / 60  # half of the time is for training
    took = f"opening the model took {format_seconds(began)}, and a pass takes {format_seconds(step)}"
    return (
        f"`minutes` {limit.minutes:g} is too short for {LEAST_TOKENS} tokens of text: {took}; "
        f"give {math.ceil(needed)} minutes or more"
    )


def _short(codec: TextCodec, questions: Sequence[str]) -> list[tuple[int, ...]]:
    """The questions in token ids, but for those that are too long."""
    raw = not codec.has_chat_template
    encoded = [tuple(codec.encode_prompt(text, raw=raw)) for text in questions]
    short = [ids for ids in encoded if len(ids) <= LONGEST_QUESTION]
    if not short:
        raise RequestError(f"every prompt is longer than {LONGEST_QUESTION} tokens: give shorter ones")
    return short


def _question(asked: Sequence[tuple[int, ...]], number: int) -> Question:
    ids, turn = rounds(asked, number)
    heat = _TEMPERATURES[(number + turn) % len(_TEMPERATURES)]
    return Question(ids, heat or (_AGAIN if turn else 0.0))


def write_taps(
    store: Store,
    target: LoadedModel,
    layers: Sequence[int],
    batch: int,
    notify: Callable[[Event], None],
) -> None:
    """Write what enters some layers, for each file of the store that lacks it. Raises DiskFullError."""
    missing = store.without_taps(layers)
    if not missing:
        return
    needed = store.require_taps(missing, len(layers))
    notify(
        Notice(f"what enters layers {', '.join(map(str, layers))} takes about {format_bytes(needed)} more")
    )
    total = store.batches
    for file in missing:
        passages = [store.read(number) for number in store.passages_of(file)]
        found: list[torch.Tensor] = []
        for start in range(0, len(passages), batch):
            found += _tapped(target, [p.tokens for p in passages[start : start + batch]], layers)
        store.add_taps(file, layers, torch.cat(found, 1))
        notify(LoadProgress("reading the text again", file + 1, total, "files"))


def _tapped(target: LoadedModel, texts: Sequence[torch.Tensor], layers: Sequence[int]) -> list[torch.Tensor]:
    """Of each text [n] its taps [taps, n, H]; texts are filled up, which what stands before does not see."""
    lengths = [len(text) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(target.device)
    batch, parts = Batch(target, tokens.shape[1], layers), []
    with batch.running():
        for start in range(0, tokens.shape[1], PIECE):
            _, taps = batch.run(tokens[:, start : start + PIECE])
            parts.append(torch.stack(taps).cpu())
    whole = torch.cat(parts, 2)  # [taps, B, n, H]
    return [whole[:, row, :length] for row, length in enumerate(lengths)]
