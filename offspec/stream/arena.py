"""Page-aligned memory of an exact size.

O_DIRECT needs aligned buffers, and torch's pinned allocator rounds sizes up to a power of two. So arenas are
anonymous memory maps: exact, aligned, and registered with CUDA if they are copied to a device.
"""

import contextlib
import mmap

import torch

from offspec.core.errors import CapacityError

PAGE = mmap.PAGESIZE


def round_up(size: int, to: int = PAGE) -> int:
    return -(-size // to) * to


class Arena:
    """Zeroed, page-aligned memory of `nbytes`, as a uint8 tensor and a writable buffer.

    pin: whether to register the memory with CUDA. If CUDA refuses, the arena stays pageable, `pinned` is
    False, and copies from it are not asynchronous. Raises CapacityError if the memory cannot be allocated.
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
            with contextlib.suppress(OSError):  # without huge pages it is only slower
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pinned = pin and self._register()

    def _register(self) -> bool:
        try:
            status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0)
        except (RuntimeError, AssertionError):  # no driver, or torch without CUDA: computing will fail
            return False
        if int(status) == 0:
            return True
        # CUDA keeps the failure as this thread's last error, and torch checks that after every kernel launch,
        # so the next launch would seem to fail. This launch clears the error.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
        return False

    def close(self) -> None:
        """Unregister the memory. The map is freed when the last tensor that uses it is deleted."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self.pinned = False
