"""Having the target answer questions, batch by batch, until there is text enough."""

from collections.abc import Callable, Sequence

from offspec.core import memory
from offspec.core.config import format_bytes
from offspec.core.errors import RequestError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.distill.config import Wanted
from offspec.distill.generate_batch import Question, answer
from offspec.distill.questions import rounds
from offspec.distill.store import Store
from offspec.model.loaded import LoadedModel
from offspec.model.tokenizer import TextCodec

LONGEST_QUESTION = 512  # tokens; what is longer is left out

_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of answers, in turn
_AGAIN = 0.8  # of an answer to a question that was answered greedily before


def write_text(
    store: Store,
    target: LoadedModel,
    codec: TextCodec,
    questions: Sequence[str],
    wanted: Wanted,
    batch: int,
    notify: Callable[[Event], None],
) -> None:
    """Answers to `batch` questions at a time, each kept as it is complete, beside those that are there.

    Raises RequestError where no question is short enough, DiskFullError.
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
    while store.tokens < wanted.tokens:
        before = store.tokens

        def step(count: int, before: int = before) -> None:
            done = min(before + count, wanted.tokens)
            notify(LoadProgress(stage, done, wanted.tokens, "tokens"))

        chosen = [_question(asked, store.passages + at) for at in range(batch)]
        chosen.sort(key=lambda question: len(question.ids))  # so that they begin to be answered together
        store.add(answer(target, chosen, wanted.length, codec.eos_ids, seed=store.passages, step=step))
        memory.trim()  # what a batch took is given back before the next is begun


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
