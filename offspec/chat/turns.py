"""Turns of a conversation: the messages for a new, edited or retried question, and the answer so far."""

import time
from collections.abc import Sequence
from dataclasses import replace

from offspec.chat.branches import MessageTree
from offspec.chat.message import AnswerFigures, Message, checked_text
from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, PassStats, Result, TextDelta
from offspec.core.values import read_value

_SEEDS = 2**64


def question_indices(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the questions."""
    return [index for index, message in enumerate(messages) if message.role == "user"]


def with_question(tree: MessageTree, text: str) -> MessageTree:
    """Add a question. Raises RequestError if it is empty, not a string, or not valid Unicode."""
    if not checked_text(text).strip():
        raise RequestError("the question is empty")
    # Questions and answers alternate, but the last question may have no answer.
    missing = [Message("assistant", "")] if tree.messages and tree.messages[-1].role == "user" else []
    return tree.extended(*missing, Message("user", text))


def with_edited_question(tree: MessageTree, text: str) -> MessageTree:
    """Add another version of the last question. Raises RequestError if there is none, or for invalid text."""
    questions = question_indices(tree.messages)
    if not questions:
        raise RequestError("there is no question to edit")
    return with_question(tree.forked(questions[-1]), text)


def rewind_index(tree: MessageTree, turns: int) -> int:
    """Return the index where the last `turns` questions begin. Raises RequestError if `turns` is invalid."""
    turns = read_value("turns", turns, int)
    questions = question_indices(tree.messages)
    if 1 <= turns <= len(questions):
        return questions[-turns]
    if not questions:
        raise RequestError("there is no question to undo")
    raise RequestError(f"cannot undo {turns} questions; the conversation has {len(questions)}")


def for_retry(tree: MessageTree) -> MessageTree:
    """Add another version of the last turn, without its answer. Raises RequestError if there is no question.

    An empty answer is not kept as a version.
    """
    questions = question_indices(tree.messages)
    if not questions:
        raise RequestError("there is no answer to retry")
    at = questions[-1]
    if any(message.content or message.token_ids for message in tree.messages[at + 1 :]):
        return tree.forked(at).extended(tree.messages[at])
    return replace(tree, messages=tree.messages[: at + 1])


def with_fresh_seed(params: SamplingParams, tree: MessageTree) -> SamplingParams:
    """Return parameters for another answer to the last question, with a fixed seed that was not used for it.

    The seed that was set is used first, then the next higher seeds.
    """
    if params.seed is None or not tree.messages:
        return params
    at, seed = question_indices(tree.messages)[-1], params.seed
    versions = next((fork.versions for fork in tree.forks() if fork.at == at), (tree.messages[at:],))
    used = {message.figures.seed for version in versions for message in version if message.figures}
    while seed in used:
        seed = (seed + 1) % _SEEDS
    return replace(params, seed=seed)


class PartialAnswer:
    """Answer collected from a stream of events, available however the stream ends.

    started: whether an event arrived. is_empty: whether no text and no token arrived. seed: requested seed,
    or None. opened: text with which the prompt began the answer. finish: reason for the end, "failed" unless
    another is known. result: None until the stream has finished.
    """

    def __init__(self, seed: int | None, opened: str) -> None:
        self.started = False
        self.finish = "failed"
        self.result: Result | None = None
        self.ids: list[int] = []
        self.seed, self.opened = seed, opened
        self._parts: list[str] = []
        self._passes, self._bytes, self._began = 0, 0, time.perf_counter()

    @property
    def is_empty(self) -> bool:
        return not self.ids and not any(self._parts)

    def add(self, event: Event) -> None:
        """Add the next event."""
        self.started = True
        match event:
            case TextDelta(text=text, token_ids=ids):
                self._parts.append(text)
                self.ids += ids
            case PassStats():
                self._passes += 1
                self._bytes += event.bytes_streamed
            case Finished(result=result):
                self.result, self.finish = result, result.finish_reason

    def message(self, finish: str | None) -> Message:
        """Return the answer so far as a message. finish: reason for the end; None while it continues."""
        ids = tuple(self.ids)
        passes, seconds = self._passes, time.perf_counter() - self._began
        nbytes, seed = self._bytes, self.seed
        if self.result:
            seconds, nbytes, seed = self.result.seconds, self.result.bytes_streamed, self.result.seed
        figures = AnswerFigures(len(ids), passes, seconds, nbytes, seed)
        return Message("assistant", "".join(self._parts), ids, finish, figures, self.opened)
