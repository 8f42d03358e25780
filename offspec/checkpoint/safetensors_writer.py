"""Writing a safetensors file tensor by tensor, aligned for O_DIRECT reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from offspec.checkpoint.tensors import dtype_name, nbytes_of
from offspec.core.files import atomic_file, reserve, sync_folder, write_all

if TYPE_CHECKING:
    import torch

# Alignment of a file's data: a multiple of the disk's block size and of the page size.
ALIGNMENT = 4096

Entry = tuple[str, str, tuple[int, ...]]


class SafetensorsWriter:
    """Writer of a safetensors file whose tensors are declared beforehand and written in order.

        with SafetensorsWriter(path, [("weight", "BF16", (2, 3))]) as out:
            out.write("weight", tensor)

    The file appears at `path` when the block ends, complete and synced; after an error nothing remains. The
    data starts at offset `start`, a multiple of 4096 bytes: the JSON header is padded with spaces, as the
    format allows. `on_bytes` may be set to receive all bytes of the file, in order.

    Args:
        path: File to write.
        entries: (name, safetensors dtype name, shape) of each tensor.
        metadata: Additional metadata of the header.
        on_write: Receives the size of each buffer in bytes.
        mode: Permissions of the file, restricted by the user's umask.

    Raises DiskFullError if the disk is full, and ValueError for tensors that are out of order, differ from
    the declared size, or are missing when the block ends.
    """

    def __init__(
        self,
        path: Path | str,
        entries: Iterable[Entry],
        *,
        metadata: Mapping[str, str] | None = None,
        on_write: Callable[[int], None] | None = None,
        mode: int = 0o666,
    ) -> None:
        self.path, self._mode = Path(path), mode
        self._sizes: dict[str, int] = {}
        self._header, self.nbytes = self._lay_out(list(entries), metadata)
        self.start = len(self._header)
        self._todo = iter(self._sizes.items())
        self._name, self._left = "", 0
        self._on_write = on_write
        self.on_bytes: Callable[[memoryview], None] | None = None

    def _lay_out(self, entries: list[Entry], metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
        """Return the padded header with its length field, and the size of the whole file."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for name, dtype, shape in entries:
            if name in header:
                raise ValueError(f"tensor {name} is listed twice")
            size = nbytes_of(dtype, tuple(shape))
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            self._sizes[name] = size
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text, 8 + len(text) + end

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._fd = stack.enter_context(atomic_file(self.path, self.nbytes, self._mode))
            reserve(self._fd, self.nbytes)
            self._put(memoryview(self._header))
            self._file = stack.pop_all()
        return self

    def write(self, name: str, buffer: Any) -> None:
        """Write the next tensor, or the next piece of the current one.

        `buffer` is any contiguous buffer, numpy array or CPU tensor. A large tensor may be written in
        consecutive pieces.
        """
        data = _as_bytes(buffer)
        if self._left == 0:
            self._name, self._left = next(self._todo, ("", 0))
        if name != self._name:
            raise ValueError(f"tensor {name} was written instead of {self._name or 'nothing'}")
        if len(data) > self._left:
            raise ValueError(f"tensor {name} has {self._left} bytes left to write, not {len(data)}")
        self._put(data)
        self._left -= len(data)
        if self._on_write:
            self._on_write(len(data))

    def _put(self, data: memoryview) -> None:
        write_all(self._fd, data)
        if self.on_bytes:
            self.on_bytes(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._file.__exit__(kind, error, trace)
            return
        with self._file:
            missing = [self._name] if self._left else [name for name, size in self._todo if size]
            if missing:
                raise ValueError(f"{self.path.name} ended before tensor {missing[0]} was written")
        sync_folder(self.path.parent)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], mode: int = 0o666) -> None:
    """Write tensors by name to a file, in this order. Raises DiskFullError."""
    entries = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with SafetensorsWriter(path, entries, mode=mode) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)


def _as_bytes(buffer: Any) -> memoryview:
    """Return the bytes of a buffer, array or CPU tensor, without a copy if it is contiguous."""
    if hasattr(buffer, "untyped_storage"):  # a torch tensor: numpy has no bfloat16, so go through bytes
        import torch

        flat = buffer.detach().cpu().contiguous().view(-1)
        buffer = flat.view(torch.uint8).numpy() if flat.numel() else b""
    view = memoryview(buffer)
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
