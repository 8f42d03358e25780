"""A slower link: two pieces of a layer are under way, and each takes as long as a link of that rate would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AHEAD = 1e-4  # a sleep ends that much before it is due, as it wakes late


class Link:
    """When the pieces that were sent would have come. A piece begins when the one before has come."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._come = [0.0, 0.0]  # of the last two pieces

    def wait_for_room(self) -> None:
        """Until the piece before the last has come: no more than two are under way."""
        _sleep_until(self._come[0])

    def send(self, nbytes: int) -> None:
        begin = max(self._come[1], time.perf_counter())
        self._come = [self._come[1], begin + nbytes / self._rate]

    def wait(self) -> None:
        """Until all have come."""
        _sleep_until(self._come[1])


def _sleep_until(due: float) -> None:
    while (left := due - time.perf_counter()) > _AHEAD:
        time.sleep(left - _AHEAD / 2)


@contextmanager
def paced(bytes_per_s: float | None) -> Iterator[None]:
    """Slow down what `DeviceStream` copies; as fast as the machine goes with None.

    The copies themselves take as long as they do here, so the real link is busy for a part of the time only.
    """
    if bytes_per_s is None:
        yield
        return
    from offspec.stream.device_stream import DeviceStream

    send, copy, link = DeviceStream._send, DeviceStream._copy, Link(bytes_per_s)

    def paced_send(self: DeviceStream, into: Any, piece: Any, number: int) -> None:
        link.wait_for_room()
        send(self, into, piece, number)
        link.send(len(piece))

    def paced_copy(self: DeviceStream, unit: int, memory: Any, slot: int) -> int:
        nbytes = copy(self, unit, memory, slot)
        link.wait()
        return nbytes

    DeviceStream._send, DeviceStream._copy = paced_send, paced_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceStream._send, DeviceStream._copy = send, copy  # type: ignore[method-assign]
