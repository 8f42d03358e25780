"""The link from RAM to the device: pinning, copies by piece size, and units through the ring buffer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_day.step_context import StepContext
from bench.stream.floor import synchronize

if TYPE_CHECKING:
    from torch import Tensor

    from offspec.stream.device_stream import DeviceStream

_MB = 1 << 20


def measure(context: StepContext) -> None:
    import torch

    from offspec.stream.arena import Arena

    size, found = (4 * _MB if context.dry else 2048 * _MB), context.found
    began = time.perf_counter()
    arena = Arena(size, pin=True)
    found["arena"] = {"bytes": size, "pinned": arena.pinned, "seconds": time.perf_counter() - began}
    arena.tensor.fill_(7)
    device = torch.empty(size, dtype=torch.uint8, device=context.device)
    found["copies"] = {}
    for piece in (1,) if context.dry else (1, 4, 16, 64, 512):
        found["copies"][f"{piece} MiB"] = _copies(device, arena.tensor, piece * _MB)
        context.save()
    found["copies_back"] = _copies(arena.tensor, device, 64 * _MB)
    arena.close()
    found["ring"] = _ring(
        context, (_MB if context.dry else 454 * _MB), units=6, rounds=2 if context.dry else 6
    )
    found["short"] = f"ring {found['ring']['bytes_per_s'] / 1e9:.1f} GB/s, pieces " + ", ".join(
        f"{name} {row['bytes_per_s'] / 1e9:.1f}" for name, row in found["copies"].items()
    )


def _copies(target: Tensor, source: Tensor, piece: int) -> dict[str, float]:
    """Return bytes per second of copies in pieces, and the host's time to launch one."""
    device = target.device if target.device.type != "cpu" else source.device
    for counted in (False, True):
        synchronize(device)
        began = time.perf_counter()
        for into, some in zip(target.split(piece), source.split(piece), strict=True):
            into.copy_(some, non_blocking=True)
        asked = time.perf_counter() - began
        synchronize(device)
        if counted:
            break
    rate = len(source) / (time.perf_counter() - began)
    return {"bytes_per_s": rate, "host_seconds_each": asked / -(-len(source) // piece)}


def _ring(context: StepContext, nbytes: int, units: int, rounds: int) -> dict[str, float]:
    """Stream units from RAM through `DeviceStream` without computing."""
    from offspec.stream.arena import Arena
    from offspec.stream.device_stream import DeviceStream
    from offspec.stream.layout import Extent, Move, UnitLayout

    extent = Extent(Path("/dev/zero"), 0, nbytes, nbytes, 0)
    layouts = [UnitLayout(f"unit {i}", (extent,), {}, (Move(0, 0, nbytes),), {}) for i in range(units)]
    arenas = {i: Arena(nbytes, pin=True) for i in range(units)}
    stream = DeviceStream(layouts, arenas, None, 3, context.device)
    try:
        _go_round(stream, units, 1)
        began = time.perf_counter()
        _go_round(stream, units, rounds)
        seconds = time.perf_counter() - began
    finally:
        stream.close()
        for arena in arenas.values():
            arena.close()
    return {"bytes_per_s": rounds * units * nbytes / seconds, "unit_bytes": nbytes}


def _go_round(stream: DeviceStream, units: int, rounds: int) -> None:
    for unit in list(range(units)) * rounds:
        stream.acquire(unit)
        stream.release()
