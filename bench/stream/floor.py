"""Processor time of a pass without streaming: its matrix products and its attention.

`gemm`: the matrices of all layers, with the rows of the pass. `attention`: torch's own, at the pass's shapes.
Both are timed on a few random layers of the model's shape, larger than any cache, used in turn, and scaled to
the number of layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LEAST_BYTES = 256_000_000  # of weights: eight times the caches of the machines this was written on
_LEAST_SECONDS = 0.3  # minimum duration of a timing


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one pass through all layers."""

    gemm: float
    attention: float

    def mean(self, other: Compute) -> Compute:
        """Return the mean of two measurements."""
        return Compute((self.gemm + other.gemm) / 2, (self.attention + other.attention) / 2)

    def to_json(self) -> dict[str, float]:
        return {f"{name}_seconds": value for name, value in asdict(self).items()}


def _cycle(config: Any) -> int:
    """Return how many of the first layers are needed to include every kind of layer."""
    kinds = getattr(config, "layer_types", None) or [""]
    return next(count for count in range(1, len(kinds) + 1) if set(kinds[:count]) == set(kinds))


class ComputeFloor:
    """Random matrices of a few layers of a checkpoint's shape, in memory, to time passes with.

    folder: contains its config.json. Raises the errors of transformers for an unreadable configuration.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        import torch
        from transformers import AutoConfig, AutoModel

        config: Any = AutoConfig.from_pretrained(folder)
        few = AutoConfig.from_pretrained(folder, num_hidden_layers=_cycle(config))
        with torch.device("meta"):
            modules = AutoModel.from_config(few).layers.modules()
        shapes = [module.weight.shape for module in modules if isinstance(module, torch.nn.Linear)]
        of_one = sum(rows * columns for rows, columns in shapes) / few.num_hidden_layers
        self.layers: int = config.num_hidden_layers
        self.flops_per_row = round(2 * of_one * self.layers)  # of the products only
        copies = max(1, round(_LEAST_BYTES / (dtype.itemsize * of_one * few.num_hidden_layers)))
        self._config, self._dtype, self._device = config, dtype, device
        self._weights = [self._random(*shape) for _ in range(copies) for shape in shapes]
        self._share = self.layers / (copies * few.num_hidden_layers)
        self._seen: set[tuple[str, int, int]] = set()

    def measure(self, rows: int, chunk: int | None = None) -> Compute:
        """Time a pass of `rows` rows with an empty cache. chunk: rows that pass through a layer at once."""
        import torch

        chunk = min(chunk or rows, rows)
        with torch.inference_mode():
            gemm = self._gemm(chunk) * self._share * rows / chunk
            return Compute(gemm, self.layers * self._attention(rows, chunk))

    def _gemm(self, rows: int) -> float:
        import torch

        inputs = {width: self._random(rows, width) for width in {w.shape[1] for w in self._weights}}

        def multiply() -> None:
            for weight in self._weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        return self._seconds("gemm", rows, rows, multiply)

    def _attention(self, rows: int, chunk: int) -> float:
        """Time one layer's attention: the faster of causal at once and masked in chunks, as trees need."""
        import torch

        heads, groups = self._config.num_attention_heads, self._config.num_key_value_heads
        size: int = getattr(self._config, "head_dim", None) or self._config.hidden_size // heads
        query = self._random(1, heads, rows, size)
        key, value = self._random(1, groups, rows, size), self._random(1, groups, rows, size)
        shared = heads // groups
        attend = torch.nn.functional.scaled_dot_product_attention

        def causal() -> None:
            attend(query, key, value, is_causal=True, enable_gqa=True)

        parts = []
        for start in range(0, rows, chunk):
            end = min(start + chunk, rows)
            ahead = torch.ones(end - start, end, dtype=torch.bool, device=self._device).triu_(start + 1)
            mask = torch.zeros(end - start, end, dtype=self._dtype, device=self._device)
            mask = mask.masked_fill_(ahead, float("-inf")).repeat(shared, 1)
            part = query[:, :, start:end].reshape(1, groups, shared * (end - start), size)
            parts.append((part, end, mask))

        def masked() -> None:
            for part, end, mask in parts:
                attend(part, key[:, :, :end], value[:, :, :end], attn_mask=mask)

        return min(self._seconds("causal", rows, chunk, causal), self._seconds("masked", rows, chunk, masked))

    def _random(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(*shape, device=self._device, dtype=self._dtype)

    def _seconds(self, what: str, rows: int, chunk: int, call: Callable[[], None]) -> float:
        """Return the mean time of a call, warmed up when a shape is first used."""
        if (what, rows, chunk) not in self._seen:
            self._seen.add((what, rows, chunk))
            call()
        synchronize(self._device)
        done, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < _LEAST_SECONDS or not done:
            call()
            done += 1
            synchronize(self._device)
        return spent / done


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; do nothing on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
