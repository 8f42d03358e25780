"""A claim to a file that is replaced at every write, so that two processes do not write over each other.

The file itself is another one after every write, so the kernel locks a hidden file beside it. The lock ends
with the process, however that ends: what a dead one left behind is in nobody's way.
"""

import fcntl
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

from offspec.core.errors import SessionError
from offspec.core.files import private_folder, real_path

_TRIES = 10
_BETWEEN_S = 0.02  # between tries: who merely looks, with `is_claimed`, is gone by then


class Claim:
    """The right to write a file, until `release`, or until nobody holds this object any more."""

    def __init__(self, file: Path) -> None:
        """Raises SessionError where another claim to the file is held.

        Where no lock can be had, in a folder that is read-only or on a disk without locks, it goes without.
        """
        self._held: weakref.finalize[[int, Path], Claim] | None = None
        lock = _beside(file)
        try:
            private_folder(file.parent)
            descriptor = _lock(lock)
        except (OSError, ValueError):
            return
        if descriptor is None:
            raise SessionError(
                f"the conversation in {file} is open in another terminal; leave it there first, or begin "
                "a new one"
            )
        self._held = weakref.finalize(self, _unlock, descriptor, lock)

    def release(self) -> None:
        """Let others have it."""
        if self._held is not None:
            self._held()


def is_claimed(file: Path) -> bool:
    """Whether somebody holds a claim to a file, which is not touched."""
    try:
        descriptor = os.open(_beside(real_path(file)), os.O_RDONLY)
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


def _beside(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")


def _lock(lock: Path) -> int | None:
    """An open file that is locked, or None where somebody else has it. Raises OSError."""
    for _ in range(_TRIES):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(descriptor, lock):  # and not the one that its holder took away just now
                return descriptor
        except BlockingIOError:
            time.sleep(_BETWEEN_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _unlock(descriptor: int, lock: Path) -> None:
    """Take the lock away while it is held, so that nobody else can have come by it."""
    with suppress(OSError):
        if _is(descriptor, lock):
            lock.unlink()
    os.close(descriptor)


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
