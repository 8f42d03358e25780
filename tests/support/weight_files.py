"""Weight files that tests damage and restore while a program reads them."""

import os
from collections.abc import Callable
from pathlib import Path


def restorer(file: Path) -> Callable[[], None]:
    """Return a function that restores a file in place: its bytes, and its time, else it counts as changed."""
    whole, before = file.read_bytes(), file.stat()

    def restore() -> None:
        file.write_bytes(whole)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    return restore
