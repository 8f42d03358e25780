"""A claim to a file that is replaced at every write, so that two processes do not write over each other.

The file itself is another one after every write, so a hidden file beside it is locked. The kernel ends the
lock with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.core.errors import SessionError
from offspec.core.files import private_folder, probe, real_path

if TYPE_CHECKING:
    from filelock import BaseFileLock

_PATIENCE_S = 0.2  # `is_claimed` holds a lock for less


class Claim:
    """The right to write a file, until `release`, or until this object is collected."""

    def __init__(self, file: Path) -> None:
        """Raises SessionError where another claim to the file is held.

        Where no lock can be had, in a folder that is read-only or on a disk without locks, it goes without.
        """
        from filelock import Timeout

        self._held: weakref.finalize[[BaseFileLock], Claim] | None = None
        try:
            private_folder(file.parent)
            lock = lock_beside(file)
            lock.acquire(timeout=_PATIENCE_S, poll_interval=_PATIENCE_S / 10)
        except Timeout:
            raise SessionError(
                f"the conversation in {file} is open in another terminal; leave it there first, or begin "
                "a new one"
            ) from None
        except (OSError, ValueError):
            return
        self._held = weakref.finalize(self, release, lock)

    def release(self) -> None:
        """Let others have it."""
        if self._held is not None:
            self._held()


def is_claimed(file: Path) -> bool:
    """Whether a process holds a claim to a file, which is not touched."""
    try:
        descriptor = os.open(_beside(real_path(file)), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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


def lock_beside(path: Path) -> BaseFileLock:
    """The lock of a file or folder: a hidden file beside it, for any thread. Raises OSError."""
    from filelock import FileLock

    probe(path)  # where no file can be made, as in /proc, a lock would wait for ever
    return FileLock(_beside(path), mode=0o600, thread_local=False)


def release(lock: BaseFileLock) -> None:
    """Give a lock back. Its file goes while it is held, so that no other process can have taken it."""
    with suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
