"""How long OpenMP threads spin while they wait for each other: told before torch is loaded.

torch computes with a team of OpenMP threads that wait for each other at the end of every product. While they
wait they spin, by libgomp's default for milliseconds, which stops a machine that does other work too: see
`model.contention`, which takes part in this while answers are made.
"""

import ctypes
import os
import sys
from contextlib import suppress

# Turns of a waiting thread's loop before it sleeps, some 15 ns each; "active": ten times as many as usual
# where threads are more than processors. Sleeping at once costs a third of the speed of an idle machine.
VARIABLES = {"GOMP_SPINCOUNT": "100000", "OMP_WAIT_POLICY": "active"}

_SOFT = 1  # omp_pause_soft of OpenMP 5.0: settings stay


def limit_spinning() -> None:
    """Let waiting threads of this process sleep early, unless the environment says how they are to wait.

    libgomp reads its settings when it is loaded, so this does nothing once torch was imported.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ.update(VARIABLES)


def unlimited_spinning() -> str | None:
    """What to tell the user where torch was imported too early for `limit_spinning`, else None."""
    torch = sys.modules.get("torch")
    if torch is None or torch.get_num_threads() == 1 or any(name in os.environ for name in VARIABLES):
        return None
    wanted = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    return (
        "torch was imported before offspec could limit how long its threads spin, so other processes may "
        f"slow answers down; name offspec.load before importing torch, or set {wanted}"
    )


def end_team() -> None:
    """End the idle threads of the calling thread's OpenMP team; the next product in this thread makes others.

    With the team of a thread that computes, they are more than there are processors, and libgomp then has
    waiting threads sleep early.
    """
    with suppress(OSError, AttributeError):  # another OpenMP, or none
        ctypes.CDLL(None).omp_pause_resource_all(_SOFT)
