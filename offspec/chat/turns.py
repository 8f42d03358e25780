"""A turn: what a question makes of the messages before it, and its answer as it comes."""

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


def asked(messages: Sequence[Message]) -> list[int]:
    """Where the questions are."""
    return [index for index, message in enumerate(messages) if message.role == "user"]


def with_question(tree: MessageTree, text: str) -> MessageTree:
    """One question more. Raises RequestError where it is empty, no string, or not valid Unicode."""
    if not checked_text(text).strip():
        raise RequestError("the question is empty")
    # The answer to one that was asked before may never have come, and they take turns.
    missing = [Message("assistant", "")] if tree.messages and tree.messages[-1].role == "user" else []
    return tree.extended(*missing, Message("user", text))


def with_other_question(tree: MessageTree, text: str) -> MessageTree:
    """Another version of the last question. Raises RequestError, also where there is none."""
    questions = asked(tree.messages)
    if not questions:
        raise RequestError("there is no question to ask differently")
    return with_question(tree.forked(questions[-1]), text)


def turns_back(tree: MessageTree, turns: int) -> int:
    """Where the last `turns` questions begin. Raises RequestError for fewer, or no number."""
    turns = read_value("turns", turns, int)
    questions = asked(tree.messages)
    if 1 <= turns <= len(questions):
        return questions[-turns]
    if not questions:
        raise RequestError("there is no question to take back")
    raise RequestError(f"cannot take back {turns} questions; the conversation has {len(questions)}")


def to_answer_again(tree: MessageTree) -> MessageTree:
    """Another version of the last turn, without its answer. Raises RequestError where nothing was asked.

    Where nothing came as an answer there is nothing to keep.
    """
    questions = asked(tree.messages)
    if not questions:
        raise RequestError("there is no answer to try again")
    at = questions[-1]
    if any(message.content or message.token_ids for message in tree.messages[at + 1 :]):
        return tree.forked(at).extended(tree.messages[at])
    return replace(tree, messages=tree.messages[: at + 1])


def seeded_anew(params: SamplingParams, tree: MessageTree) -> SamplingParams:
    """Parameters for another answer to the last question: a fixed seed with which it has none yet.

    The next one above that which was set, and that one where no version of the turn was made with it.
    """
    if params.seed is None or not tree.messages:
        return params
    at, seed = asked(tree.messages)[-1], params.seed
    versions = next((fork.versions for fork in tree.forks() if fork.at == at), (tree.messages[at:],))
    used = {message.figures.seed for version in versions for message in version if message.figures}
    while seed in used:
        seed = (seed + 1) % _SEEDS
    return replace(params, seed=seed)


class PartialAnswer:
    """Gathers what a stream of events says, so that it is there whatever ends the stream.

    begun: an event came. empty: no text came, and no token. seed: the one that was asked for, if any. finish:
    why it ended, "failed" unless something else is known. result: None until the stream has come to its end.
    """

    def __init__(self, seed: int | None, opened: str) -> None:
        """opened: what the prompt has begun the answer with."""
        self.begun = False
        self.finish = "failed"
        self.result: Result | None = None
        self.ids: list[int] = []
        self.seed, self.opened = seed, opened
        self._parts: list[str] = []
        self._passes, self._bytes, self._began = 0, 0, time.perf_counter()

    @property
    def empty(self) -> bool:
        return not self.ids and not any(self._parts)

    def hear(self, event: Event) -> None:
        """Take in the next event."""
        self.begun = True
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
        """What came. finish: why it ended, None while more is coming."""
        ids = tuple(self.ids)
        passes, seconds = self._passes, time.perf_counter() - self._began
        nbytes, seed = self._bytes, self.seed
        if self.result:
            seconds, nbytes, seed = self.result.seconds, self.result.bytes_streamed, self.result.seed
        figures = AnswerFigures(len(ids), passes, seconds, nbytes, seed)
        return Message("assistant", "".join(self._parts), ids, finish, figures, self.opened)
