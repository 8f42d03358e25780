"""The memory of all layers of a cache, in one allocation: on a device, on each of several, or in RAM."""

import copy
import math
from collections.abc import Sequence

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
        nbytes: Bytes that all layers take together. Default 0: each has memory of its own.
        pieces: Tensors that are taken at most.
        device: Where it lies. Default: the CPU.
    """

    pinned = True  # or need not be

    def __init__(self, nbytes: int = 0, pieces: int = 0, device: torch.device = _CPU) -> None:
        self.nbytes = nbytes + pieces * ALIGNED
        self.device = device
        self._memory: torch.Tensor | None = None
        self._taken = 0

    def another(self) -> "CacheBlock":
        """One like it for one more cache, of which nothing is allocated or taken yet."""
        block = copy.copy(self)
        block._memory, block._taken = None, 0
        return block

    def allocate(self) -> None:
        """Have the memory now. What an allocation raises where there is none is raised."""
        if self._memory is None and self.nbytes:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        """Give back what is more than memory; that goes with the last who holds some of it."""

    def take(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """[B, KV, rows, D] for a tensor `like` [B, KV, n, D], of its dtype and on its device."""
        shape = (*like.shape[:2], rows, like.shape[3])
        start = -(-self._taken // ALIGNED) * ALIGNED
        end = start + math.prod(shape) * like.element_size()
        if end > self.nbytes or like.device != self.device:
            return like.new_empty(shape)
        self.allocate()
        assert self._memory is not None
        self._taken = end
        return self._memory[start:end].view(like.dtype).view(shape)


class CacheBlocks(CacheBlock):
    """A block on each device that layers are computed on; rows lie in that of their own device."""

    def __init__(self, blocks: Sequence[CacheBlock]) -> None:
        """blocks: at most one for each device."""
        super().__init__()
        self._blocks = {block.device: block for block in blocks}
        self.nbytes = sum(block.nbytes for block in blocks)

    def another(self) -> "CacheBlocks":
        return CacheBlocks([block.another() for block in self._blocks.values()])

    def allocate(self) -> None:
        for block in self._blocks.values():
            block.allocate()

    def take(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        return self._blocks.get(like.device, _NO_BLOCK).take(like, rows)


_NO_BLOCK = CacheBlock()


class HostBlock(CacheBlock):
    """Rows in RAM. pin: have it pinned, as memory is that a device copies from."""

    def __init__(self, nbytes: int, pieces: int, *, pin: bool) -> None:
        super().__init__(nbytes, pieces)
        self._pin = pin
        self._arena: Arena | None = None

    def allocate(self) -> None:
        """Have the memory now. Raises CapacityError."""
        if self._memory is None:
            self._arena = Arena(self.nbytes, pin=self._pin)
            self._memory, self.pinned = self._arena.tensor, self._arena.pinned or not self._pin

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
