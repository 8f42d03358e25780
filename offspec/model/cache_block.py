"""The memory of all layers of a cache, in one allocation on each device, or in RAM."""

import copy
import math
from collections import Counter
from collections.abc import Mapping

import torch

from offspec.stream.arena import Arena

ALIGNED = 64  # bytes: what kernels read at once begins at a multiple of it
_CPU = torch.device("cpu")


class CacheBlock:
    """Memory that layers take their rows from, one behind the other, as they show what shape those have.

    On a device that is one allocation in the place of some hundred, which would leave gaps of all sizes. What
    finds no room, or has to grow, gets memory of its own. It is allocated by the first to take from it, or by
    `allocate`.

    Args:
        sizes: By device, bytes that layers take together, and how many tensors at most. Default: none, so
            that each has memory of its own.
    """

    pinned = True  # or need not be

    def __init__(self, sizes: Mapping[torch.device, tuple[int, int]] | None = None) -> None:
        self._sizes = {of: nbytes + pieces * ALIGNED for of, (nbytes, pieces) in (sizes or {}).items()}
        self.nbytes = sum(self._sizes.values())
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._taken = Counter[torch.device]()

    def another(self) -> "CacheBlock":
        """One like it for one more cache, of which nothing is allocated or taken yet."""
        block = copy.copy(self)
        block._memory, block._taken = {}, Counter()
        return block

    def allocate(self) -> None:
        """Have the memory now. What an allocation raises where there is none is raised."""
        for device in self._sizes:
            self._on(device)

    def close(self) -> None:
        """Give back what is more than memory; that goes with the last who holds some of it."""

    def take(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """[B, KV, rows, D] for a tensor `like` [B, KV, n, D], of its dtype and on its device."""
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
    """Rows in RAM. pin: have it pinned, as memory is that a device copies from."""

    def __init__(self, nbytes: int, pieces: int, *, pin: bool) -> None:
        super().__init__({_CPU: (nbytes, pieces)})
        self._pin = pin
        self._arena: Arena | None = None

    def _allocated(self, device: torch.device) -> torch.Tensor:
        """The memory, aligned. Raises CapacityError."""
        self._arena = Arena(self.nbytes, pin=self._pin)
        self.pinned = self._arena.pinned or not self._pin
        return self._arena.tensor

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
