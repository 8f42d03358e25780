"""Spin time of waiting OpenMP threads, which must be set before torch is loaded.

torch computes with a team of OpenMP threads that wait for each other at the end of every matrix product.
libgomp lets waiting threads spin for milliseconds by default, which slows down everything else on the
machine. `model.cpu_contention` limits spinning further while answers are generated.
"""

import ctypes
import os
import sys
from contextlib import suppress

# Iterations of a waiting thread's loop before it sleeps, about 15 ns each. "active": ten times as many as by
# default if there are more threads than processors. Sleeping at once costs a third of the speed on an idle
# machine.
VARIABLES = {"GOMP_SPINCOUNT": "100000", "OMP_WAIT_POLICY": "active"}

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: keeps the settings


def limit_spinning() -> None:
    """Make waiting OpenMP threads of this process sleep early, unless the environment sets their behaviour.

    libgomp reads its settings when it is loaded, so this has no effect after torch was imported.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ.update(VARIABLES)


def spinning_warning() -> str | None:
    """Return a warning if torch was imported too early for `limit_spinning`, else None."""
    torch = sys.modules.get("torch")
    if torch is None or torch.get_num_threads() == 1 or any(name in os.environ for name in VARIABLES):
        return None
    wanted = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    return (
        "torch was imported before offspec could limit thread spinning, so other processes may slow "
        f"generation down; use offspec.load before importing torch, or set {wanted}"
    )


def end_team() -> None:
    """End the idle threads of the calling thread's OpenMP team; its next matrix product starts new ones.

    Together with the team of a computing thread, the idle threads would outnumber the processors, and libgomp
    would then make waiting threads sleep early.
    """
    with suppress(OSError, AttributeError):  # another OpenMP library, or none
        ctypes.CDLL(None).omp_pause_resource_all(_SOFT)
