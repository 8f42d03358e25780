"""File locks that prevent two processes from overwriting each other's writes.

Every write replaces the file, so a hidden file next to it is locked instead. The kernel releases the lock
when the process ends, even if it is killed.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.core.errors import SessionError
from offspec.core.files import make_private_folder, probe_writable, real_path

if TYPE_CHECKING:
    from filelock import BaseFileLock

_TIMEOUT_S = 0.2  # longer than `is_claimed` holds a lock


class Claim:
    """Exclusive right to write a file, until `release` or until this object is garbage-collected."""

    def __init__(self, file: Path) -> None:
        """Lock the file. Raises SessionError if another claim to it is held.

        If locking is impossible, as in a read-only folder or on a disk without locks, the claim has no lock.
        """
        from filelock import Timeout

        self._held: weakref.finalize[[BaseFileLock], Claim] | None = None
        try:
            make_private_folder(file.parent)
            lock = lock_for(file)
            lock.acquire(timeout=_TIMEOUT_S, poll_interval=_TIMEOUT_S / 10)
        except Timeout:
            raise SessionError(
                f"the conversation in {file} is open in another terminal; close it there first, or start "
                "a new one"
            ) from None
        except (OSError, ValueError):
            return
        self._held = weakref.finalize(self, release, lock)

    def release(self) -> None:
        """Release the lock."""
        if self._held is not None:
            self._held()


def is_claimed(file: Path) -> bool:
    """Return whether a process holds a claim to a file. Does not modify the file."""
    try:
        descriptor = os.open(_lock_path(real_path(file)), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def lock_for(path: Path) -> BaseFileLock:
    """Return the lock of a file or folder, a hidden file next to it, for any thread. Raises OSError."""
    from filelock import FileLock

    probe_writable(path)  # if no file can be created, as in /proc, the lock would wait forever
    return FileLock(_lock_path(path), mode=0o600, thread_local=False)


def release(lock: BaseFileLock) -> None:
    """Release a lock. Its file is removed first, so that no other process can have locked it."""
    with suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
