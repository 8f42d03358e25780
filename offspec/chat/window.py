"""The part of a long conversation that goes into the prompt: its latest turns, behind the system message.

The first turns are left out where the context would be full, and so many at once that a quarter of it is
free again: then the prompt begins differently once, and not at every question, and caches stay of use.
Nothing is removed from the conversation.
"""

from bisect import bisect_left
from dataclasses import replace

from offspec.chat.conversation import Conversation, Message
from offspec.chat.prompt_reuse import Encoded, PromptReuse
from offspec.chat.turns import asked
from offspec.core.errors import ContextLengthError

_ANSWER = 8  # an answer should have this part of the context
_FREE = 4  # and this part is free once turns were left out


class ContextWindow:
    """Encodes conversations, of which it leaves out the beginning where that is needed.

    left_out: questions at the beginning that the last prompt left out.
    """

    def __init__(self, prompts: PromptReuse) -> None:
        self._prompts = prompts
        self._start = 0  # where the first question of the prompt is in the messages
        self._seen: list[Message] = []  # the messages that were encoded last
        self.left_out = 0

    def encode(self, conversation: Conversation, context: int) -> Encoded:
        """The prompt that asks for the next answer.

        Args:
            conversation: With the question at its end.
            context: Tokens that a prompt and its answer may have together.

        Raises:
            ContextLengthError: The last question alone leaves no room for an answer.
            RequestError: The template refuses it.
        """
        messages = conversation.messages
        questions = asked(messages)
        if messages and self._prompts.exceeds(messages[-1].content, context):
            raise ContextLengthError(
                f"the question has more than {2 * context:,} tokens, and the context has room for "
                f"{context:,} with the answer; shorten it, or load with a larger `context`"
            )
        encoded, start = self._encode_from(self._kept_start(conversation, context), conversation)
        if len(encoded.ids) > context - context // _ANSWER and (later := [q for q in questions if q > start]):
            room = context - context // _FREE
            index = bisect_left(later, True, key=lambda q: self._tokens_from(q, conversation) <= room)
            encoded, start = self._encode_from(later[min(index, len(later) - 1)], conversation)
        if len(encoded.ids) >= context:
            with_system = " with the system message" if conversation.system else ""
            raise ContextLengthError(
                f"the question has {len(encoded.ids):,} tokens{with_system}, and the context has room for "
                f"{context:,} with the answer; shorten it, or load with a larger `context`"
            )
        self._start, self._seen = start, list(messages)
        self.left_out = sum(q < start for q in questions)
        return encoded

    def _kept_start(self, conversation: Conversation, context: int) -> int:
        """Where the last prompt began, while the conversation only continues or the whole has no room."""
        continues = conversation.messages[: len(self._seen)] == self._seen
        if not self._start or continues:
            return self._start
        same = conversation.messages[: self._start] == self._seen[: self._start]
        fits = self._tokens_from(0, conversation) <= context - context // _FREE
        return self._start if same and len(conversation.messages) > self._start and not fits else 0

    def _tokens_from(self, start: int, conversation: Conversation) -> int:
        return len(self._encode_from(start, conversation)[0].ids)

    def _encode_from(self, start: int, conversation: Conversation) -> tuple[Encoded, int]:
        """The prompt of the messages from there on, and where that is."""
        return self._prompts.encode(replace(conversation, messages=conversation.messages[start:])), start
