"""Times of one answer, as APIs of local servers report them."""

import time


class AnswerTimes:
    """Nanoseconds from a request to its first token, and from there to its last."""

    def __init__(self) -> None:
        self._noted = [time.perf_counter_ns()]  # of the request, the first token and the last

    def note(self) -> None:
        """Note that something of the answer has come."""
        self._noted[2:] = [time.perf_counter_ns()]

    @property
    def prompt(self) -> int:
        """From the request to the first token: its time in the queue is a part of it."""
        return max(self._noted[min(1, len(self._noted) - 1)] - self._noted[0], 1)

    @property
    def answer(self) -> int:
        """From the first token to the last. If all came at once: from the request."""
        return max(self._noted[2] - self._noted[1], 1) if len(self._noted) > 2 else self.prompt

    @property
    def total(self) -> int:
        """From the request to the last token."""
        return max(self._noted[-1] - self._noted[0], 1)
