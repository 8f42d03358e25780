"""A throttled link: two pieces of a layer are in flight, and each takes as long as at the given rate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AHEAD = 1e-4  # seconds: a sleep ends this much early, because it wakes late


class ThrottledLink:
    """Arrival times of sent pieces at the given rate. A piece starts when the previous one has arrived."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._come = [0.0, 0.0]  # arrival of the last two pieces

    def wait_for_room(self) -> None:
        """Wait until the piece before the last has arrived: at most two are in flight."""
        _sleep_until(self._come[0])

    def send(self, nbytes: int) -> None:
        begin = max(self._come[1], time.perf_counter())
        self._come = [self._come[1], begin + nbytes / self._rate]

    def wait(self) -> None:
        """Wait until all pieces have arrived."""
        _sleep_until(self._come[1])


def _sleep_until(due: float) -> None:
    while (left := due - time.perf_counter()) > _AHEAD:
        time.sleep(left - _AHEAD / 2)


@contextmanager
def throttled(bytes_per_s: float | None) -> Iterator[None]:
    """Throttle the copies of `DeviceStream` to a rate; None: full speed.

    The copies themselves run at the machine's speed, so the real link is busy for only part of the time.
    """
    if bytes_per_s is None:
        yield
        return
    from offspec.stream.device_stream import DeviceStream

    send, copy, link = DeviceStream._send, DeviceStream._copy, ThrottledLink(bytes_per_s)

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
