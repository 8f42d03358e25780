"""A slower link: pieces of a layer are sent no sooner than a link of that rate would bring them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AHEAD = 1e-4  # a sleep ends that much before it is due, as it wakes late


@contextmanager
def paced(bytes_per_s: float | None) -> Iterator[None]:
    """Pace what `DeviceStream` sends; as fast as the machine goes with None.

    The copies themselves take as long as they do here, so a paced link is busy for a part of the time only.
    """
    if bytes_per_s is None:
        yield
        return
    from offspec.stream.device_stream import DeviceStream

    own, due = DeviceStream._send, [0.0]

    def send(self: DeviceStream, into: Any, piece: Any, number: int) -> None:
        own(self, into, piece, number)
        now = time.perf_counter()
        due[0] = max(due[0], now) + len(piece) / bytes_per_s
        if due[0] - now > 2 * _AHEAD:
            time.sleep(due[0] - now - _AHEAD)

    DeviceStream._send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceStream._send = own  # type: ignore[method-assign]
