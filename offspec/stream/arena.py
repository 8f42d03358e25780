"""Page-aligned memory of an exact size.

O_DIRECT wants aligned buffers, and torch's own pinned allocator rounds up to a power of two, so arenas are
anonymous maps: exact, aligned, and registered with CUDA where a copy to the device will read them.
"""

import contextlib
import mmap

import torch

from offspec.core.errors import CapacityError

PAGE = mmap.PAGESIZE


def round_up(size: int, to: int = PAGE) -> int:
    return -(-size // to) * to


class Arena:
    """`nbytes` of zeroed, page-aligned memory as a uint8 tensor and a writable buffer.

    pin: register the memory with CUDA. Where that is refused the arena stays pageable, `pinned` says so,
    and copies from it merely stop being asynchronous. Raises CapacityError where there is no such memory.
    """

    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        self.nbytes = round_up(max(nbytes, 1))
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError) as error:
            raise CapacityError(
                f"the system refused {self.nbytes} bytes of memory for weights ({error}); close other "
                "programs, or give a smaller `memory`",
                needed=self.nbytes,
                given=0,
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pinned = pin and self._register()

    def _register(self) -> bool:
        try:
            status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0)
        except (RuntimeError, AssertionError):  # no driver, or torch without CUDA: computing will say so
            return False
        if int(status) == 0:
            return True
        # CUDA keeps the failure as this thread's last error, and torch asks for that behind every kernel it
        # launches: the next one would seem to fail. This one takes it away.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        return False

    def close(self) -> None:
        """Unregister. The map itself is freed when the last tensor that looks into it is gone."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self.pinned = False
