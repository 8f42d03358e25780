"""Memory for all layers of a KV cache: one allocation per device, or one in RAM."""

import copy
import math
from collections import Counter
from collections.abc import Mapping

import torch

from offspec.stream.arena import Arena

ALIGNED = 64  # bytes: alignment of each tensor, for vectorized kernel reads
_CPU = torch.device("cpu")


class CacheBlock:
    """Bump allocator for the rows of cache layers, whose shapes are known only at the first pass.

    On a device, one allocation replaces some hundred, which would fragment memory. A tensor that does not
    fit, or has to grow, gets its own allocation. The first `take` or a call of `allocate` allocates the
    memory.

    Args:
        sizes: By device, total bytes for all layers and maximum number of tensors. Default: no shared memory,
            so that each tensor has its own allocation.
    """

    pinned = True  # or pinning is not required

    def __init__(self, sizes: Mapping[torch.device, tuple[int, int]] | None = None) -> None:
        self._sizes = {of: nbytes + pieces * ALIGNED for of, (nbytes, pieces) in (sizes or {}).items()}
        self.nbytes = sum(self._sizes.values())
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._taken = Counter[torch.device]()

    def empty_copy(self) -> "CacheBlock":
        """Return a block of the same sizes for another cache, with nothing allocated yet."""
        block = copy.copy(self)
        block._memory, block._taken = {}, Counter()
        return block

    def allocate(self) -> None:
        """Allocate the memory now. Raises the allocator's error if there is not enough."""
        for device in self._sizes:
            self._on(device)

    def close(self) -> None:
        """Release resources other than memory, which is freed with the last tensor in it."""

    def take(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """Return an empty tensor [B, KV, rows, D] with the dtype and device of `like` [B, KV, n, D]."""
        shape, device = (*like.shape[:2], rows, like.shape[3]), like.device
        start = -(-self._taken[device] // ALIGNED) * ALIGNED
        end = start + math.prod(shape) * like.element_size()
        if device not in self._sizes or end > self._sizes[device]:
            return like.new_empty(shape)
        memory = self._on(device)
        self._taken[device] = end
        return memory[start:end].view(like.dtype).view(shape)

    def _on(self, device: torch.device) -> torch.Tensor:
        if device not in self._memory:
            self._memory[device] = self._allocated(device)
        return self._memory[device]

    def _allocated(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self._sizes[device], dtype=torch.uint8, device=device)


class HostBlock(CacheBlock):
    """Cache memory in RAM.

    Args:
        nbytes: Total bytes of all tensors.
        pieces: Maximum number of tensors.
        pin: Whether to pin the memory for transfers to a device.
    """

    def __init__(self, nbytes: int, pieces: int, *, pin: bool) -> None:
        super().__init__({_CPU: (nbytes, pieces)})
        self._pin = pin
        self._arena: Arena | None = None

    def _allocated(self, device: torch.device) -> torch.Tensor:
        """Allocate aligned memory. Raises CapacityError."""
        self._arena = Arena(self.nbytes, pin=self._pin)
        self.pinned = self._arena.pinned or not self._pin
        return self._arena.tensor

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
