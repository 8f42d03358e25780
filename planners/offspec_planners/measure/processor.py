"""Speed of a processor: multiplying, reading memory, and launching work.

Uses torch, with its default number of threads. Devices have torch's names: cpu, cuda, cuda:1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from offspec_planners.hardware_rates import Rate

if TYPE_CHECKING:
    import torch

    Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [T, K], w [N, K] to x w^T [T, N]

_READINGS = 5
_READ_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # bytes per reading; far more than a cache holds
_WEIGHT_BYTES = {"cpu": 128_000_000, "cuda": 512_000_000}
_COPIED = (64 << 20, 256 << 20)  # bytes of the buffer copied to the device
_COPIES = 8
_SMALL = 64  # width of a layer whose time is only launch overhead


def gemm_rates(
    tokens: Sequence[int],
    *,
    rows: int,
    columns: int,
    dtype: str,
    seconds: float = 0.4,
    device: str = "cpu",
    product: Product | None = None,
) -> tuple[tuple[int, float], ...]:
    """Return (T, FLOP/s) of `x [T, columns] @ w [rows, columns]^T` for each T.

    The matrices cycle through 128 MB or more, like the layers of a streamed model. So a batch of one measures
    memory bandwidth, and a large batch the processor's arithmetic.

    Args:
        tokens: Values of T to measure.
        rows: Rows of the matrices.
        columns: Columns of the matrices.
        dtype: "bfloat16" or "float32".
        seconds: Seconds for each T, 0.4 by default.
        device: "cpu" by default, or "cuda".
        product: Function that multiplies. Default torch's.
    """
    import torch

    times: Product = product or torch.nn.functional.linear
    kind: torch.dtype = getattr(torch, dtype)
    place = torch.device(device)
    count = max(2, math.ceil(_WEIGHT_BYTES[place.type] / (rows * columns * kind.itemsize)))
    rates = list[tuple[int, float]]()
    with torch.inference_mode():
        first = torch.randn(rows, columns, dtype=kind, device=place)
        matrices = [first, *(first.clone() for _ in range(count - 1))]
        for size in tokens:
            x = torch.randn(size, columns, dtype=kind, device=place)  # [T, columns]

            def multiply(turn: int, x: torch.Tensor = x) -> object:
                return times(x, matrices[turn % count])

            each = _seconds_each(multiply, seconds, place)
            rates.append((size, float(round(2 * size * rows * columns / each))))
    return tuple(rates)


def memory_bandwidth(device: str = "cpu", seconds: float = 0.05) -> Rate:
    """Return the processor's memory read rate in bytes per second: a long sum, `seconds` per reading."""
    import torch

    place = torch.device(device)
    with torch.inference_mode():
        # Ones, since the system may map zeros to a single page.
        block = torch.ones(_READ_BYTES[place.type] // 4, device=place)
        each = [_seconds_each(lambda _: block.sum(), seconds, place) for _ in range(_READINGS)]
    return Rate.of([float(round(block.nbytes / spent)) for spent in each])


def copy_bandwidth(device: str = "cuda") -> Rate:
    """Return bytes per second from pinned memory to a CUDA device, over several large copies.

    Uses cudaMemcpyAsync on a separate stream, timed by device events.
    """
    import torch

    place, rates = torch.device(device), list[float]()
    stream = torch.cuda.Stream(place)
    for size in _COPIED:
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
        target = torch.empty(size, dtype=torch.uint8, device=place)
        torch.cuda.synchronize(place)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            for _ in range(_COPIES):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                target.copy_(source, non_blocking=True)
                end.record(stream)
                end.synchronize()
                rates.append(float(round(size / (start.elapsed_time(end) / 1000))))
        del source, target
    torch.cuda.empty_cache()
    return Rate.of(rates)


def layer_overhead(device: str = "cpu", seconds: float = 0.2) -> float:
    """Return seconds of a decoder layer that has almost nothing to compute."""
    import torch

    place = torch.device(device)
    with torch.inference_mode():
        layer = _small_layer(place)
        hidden = torch.randn(1, _SMALL, device=place)
        return _seconds_each(lambda _: layer(hidden), seconds, place)


def _small_layer(place: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the operations of a typical decoder layer, in order, on 64 numbers."""
    import torch
    from torch.nn import functional

    weight = torch.randn(_SMALL, _SMALL, device=place)
    gain, turn = torch.ones(_SMALL, device=place), torch.ones(1, 1, 1, _SMALL, device=place)

    def rotated(vector: torch.Tensor) -> torch.Tensor:
        """Perform the operations of a rotary embedding."""
        left, right = vector.chunk(2, dim=-1)
        return vector * turn + torch.cat((-right, left), dim=-1) * turn

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(hidden, (_SMALL,), gain)
        query, key, value = (functional.linear(normed, weight).view(1, 1, 1, _SMALL) for _ in range(3))
        query, key = rotated(query), rotated(key)
        seen = functional.scaled_dot_product_attention(query, key, value).view(1, _SMALL)
        hidden = hidden + functional.linear(seen, weight)
        normed = functional.rms_norm(hidden, (_SMALL,), gain)
        gate = functional.silu(functional.linear(normed, weight))
        return torch.add(hidden, functional.linear(gate * functional.linear(normed, weight), weight))

    return layer


def _seconds_each(work: Callable[[int], object], seconds: float, place: torch.device) -> float:
    """Return seconds per call of `work(turn)`, from about `seconds` of consecutive calls."""
    for turn in range(2):
        work(turn)
    done = 1
    while True:
        _wait(place)
        start = time.perf_counter()
        for turn in range(done):
            work(turn)
        _wait(place)
        spent = time.perf_counter() - start
        if spent >= seconds:
            return spent / done
        done = max(2 * done, math.ceil(1.1 * done * seconds / max(spent, 1e-9)))


def _wait(place: torch.device) -> None:
    """Wait until the device has finished its work."""
    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)
