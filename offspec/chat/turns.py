"""What a question makes of the messages before it: asked after them, in place of one, or once more."""

from collections.abc import Sequence
from dataclasses import replace

from offspec.chat.message import Message, checked_text
from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError

_SEEDS = 2**64


def asked(messages: Sequence[Message]) -> list[int]:
    """Where the questions are."""
    return [index for index, message in enumerate(messages) if message.role == "user"]


def with_question(messages: Sequence[Message], text: str) -> list[Message]:
    """One question more. Raises RequestError where it is empty or not valid Unicode."""
    if not text.strip():
        raise RequestError("the question is empty")
    # The answer to one that was asked before may never have come, and they take turns.
    missing = [Message("assistant", "")] if messages and messages[-1].role == "user" else []
    return [*messages, *missing, Message("user", checked_text(text))]


def with_other_question(messages: Sequence[Message], text: str) -> list[Message]:
    """A question in place of the last one and its answer. Raises RequestError, also where there is none."""
    questions = asked(messages)
    if not questions:
        raise RequestError("there is no question to ask differently")
    return with_question(messages[: questions[-1]], text)


def without_answer(messages: Sequence[Message]) -> list[Message]:
    """The last question without its answer, if one came. Raises RequestError where nothing was asked."""
    questions = asked(messages)
    if not questions:
        raise RequestError("there is no answer to try again")
    return list(messages[: questions[-1] + 1])


def seeded_anew(
    params: SamplingParams, last: Message, seeds: tuple[int | None, int | None]
) -> SamplingParams:
    """Parameters for another answer in place of the last message. A fixed seed moves on by one.

    It does so from an answer that was made with it, or by retries from it: seeds are the one that was fixed
    and the one that it has come to. From any other answer it begins with itself.
    """
    made = last.figures.seed if last.figures else None
    if made is None or (made != params.seed and seeds != (params.seed, made)):
        return params
    return replace(params, seed=(made + 1) % _SEEDS)
