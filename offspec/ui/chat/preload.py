"""Opening the largest library of torch before torch does, so that the interface can go on meanwhile."""

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_LIBRARY = "libtorch_cpu.so"  # half a gigabyte, with thousands of constructors to run


def preload_torch() -> None:
    """Importing torch holds the interpreter while the system opens this: 200 ms in which no key is heard.

    A call through ctypes lets the interpreter go, and finds the library open the second time. Where anything
    is otherwise here, torch does it by itself, as ever.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    file = Path(spec.submodule_search_locations[0]) / "lib" / _LIBRARY
    with suppress(OSError, AttributeError):
        open_library = ctypes.CDLL(None).dlopen
        open_library.restype, open_library.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        open_library(os.fsencode(file), os.RTLD_NOW | os.RTLD_GLOBAL)
