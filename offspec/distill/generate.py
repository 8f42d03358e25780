"""Generating text: the target answers questions, batch by batch, until there is enough text.

EAGLE-3 also needs the inputs of some layers. A second pass over the text stores them alongside.

Notation: B passages, n tokens of one, H hidden size.
"""

import math
from collections.abc import Callable, Sequence

import torch

from offspec.core import memory
from offspec.core.errors import RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.distill.batched_forward import Batch
from offspec.distill.config import LEAST_TOKENS, DistillConfig, TimeLimit
from offspec.distill.generate_batch import PROMPT_CHUNK, TrainingPrompt, generate_answers
from offspec.distill.prompts import cyclic_item
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec
from offspec_planners.units import format_bytes, format_seconds

LONGEST_QUESTION = 512  # tokens; longer questions are omitted

_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of answers, in turn
_BATCH_IN_TIME = 32  # maximum questions at a time with a time limit: the first pass reads all of them
_REPEAT_TEMPERATURE = 0.8  # temperature of repeated questions whose first answer was greedy


def write_text(
    store: Store,
    target: LoadedModel,
    codec: TextCodec,
    questions: Sequence[str],
    wanted: DistillConfig,
    batch: int,
    limit: TimeLimit,
    notify: Callable[[Event], None],
) -> None:
    """Generate answers to `batch` questions at a time, and add each complete batch to the store.

    Raises RequestError if every question is too long or the time is too short, DiskFullError.
    """
    missing = wanted.tokens - store.tokens
    if store.tokens:
        notify(Notice(f"{min(store.tokens, wanted.tokens)} tokens of text from an earlier run are reused"))
    if missing <= 0:
        return
    store.require(missing)
    size = format_bytes(missing * store.bytes_per_token)
    notify(Notice(f"{missing} tokens of text with their states will take about {size} in {store.folder}"))
    asked = _short(codec, questions)
    stage = f"{wanted.model} writes text"
    limit.begin_text()
    batch = batch if limit.minutes is None else min(batch, _BATCH_IN_TIME)
    began, steps, first = limit.spent, 0, 0.0
    while store.tokens < wanted.tokens and not (steps and limit.text_time_is_up):
        before = store.tokens

        def step(count: int, before: int = before) -> bool:
            nonlocal steps, first
            steps, first = steps + 1, first or limit.spent
            done = min(before + count, wanted.tokens)
            notify(LoadProgress(stage, done, wanted.tokens, "tokens"))
            return limit.text_time_is_up

        chosen = [_question(asked, store.passages + at) for at in range(batch)]
        chosen.sort(key=lambda question: len(question.ids))  # so that answers start at about the same time
        seed = store.passages
        if passages := generate_answers(target, chosen, wanted.length, codec.eos_ids, seed=seed, step=step):
            store.add(passages)
        memory.malloc_trim()  # return a batch's memory before the next one starts
    if store.tokens < LEAST_TOKENS:
        seconds = (limit.spent - first) / (steps - 1) if steps > 1 else first - began
        raise RequestError(_too_short(limit, began, seconds, chosen))
    if store.tokens < wanted.tokens:
        notify(Notice(f"out of time for text: {store.tokens} of {wanted.tokens} tokens are used"))


def _too_short(limit: TimeLimit, began: float, step: float, chosen: Sequence[TrainingPrompt]) -> str:
    """Return an error that there is too little text, with the time that would be enough.

    Args:
        limit: The time limit.
        began: Seconds before text generation started.
        step: Seconds per pass.
        chosen: Questions of one batch, the shortest first.
    """
    passes = len(chosen[-1].ids) - len(chosen[0].ids) + math.ceil(LEAST_TOKENS / len(chosen))
    needed = (began + 2 * passes * step) / 60  # half of the time is reserved for training
    took = f"opening the model took {format_seconds(began)}, and a pass takes {format_seconds(step)}"
    return (
        f"`minutes` {limit.minutes:g} is too short for {LEAST_TOKENS} tokens of text: {took}; "
        f"give {math.ceil(needed)} minutes or more"
    )


def _short(codec: TextCodec, questions: Sequence[str]) -> list[tuple[int, ...]]:
    """Return token ids of the questions that are short enough."""
    raw = not codec.has_chat_template
    encoded = [tuple(codec.encode_prompt(text, raw=raw)) for text in questions]
    short = [ids for ids in encoded if len(ids) <= LONGEST_QUESTION]
    if not short:
        raise RequestError(f"every prompt is longer than {LONGEST_QUESTION} tokens: give shorter ones")
    return short


def _question(asked: Sequence[tuple[int, ...]], number: int) -> TrainingPrompt:
    ids, turn = cyclic_item(asked, number)
    heat = _TEMPERATURES[(number + turn) % len(_TEMPERATURES)]
    return TrainingPrompt(ids, heat or (_REPEAT_TEMPERATURE if turn else 0.0))


def write_taps(
    store: Store,
    target: LoadedModel,
    layers: Sequence[int],
    batch: int,
    notify: Callable[[Event], None],
) -> None:
    """Store the inputs of some layers for each file that lacks them. Raises DiskFullError."""
    missing = store.without_taps(layers)
    if not missing:
        return
    needed = store.require_taps(missing, len(layers))
    notify(
        Notice(f"the inputs of layers {', '.join(map(str, layers))} take about {format_bytes(needed)} more")
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
    """Return the taps [taps, n, H] of each text [n]. Texts are padded at the end, which is causal."""
    lengths = [len(text) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(target.device)
    batch, parts = Batch(target, tokens.shape[1], layers), []
    with batch.patched_target():
        for start in range(0, tokens.shape[1], PROMPT_CHUNK):
            _, taps = batch.run(tokens[:, start : start + PROMPT_CHUNK])
            parts.append(torch.stack(taps).cpu())
    whole = torch.cat(parts, 2)  # [taps, B, n, H]
    return [whole[:, row, :length] for row, length in enumerate(lengths)]
