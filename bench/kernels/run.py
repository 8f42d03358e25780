"""Running one case of the kernels bench: check at a small size, timing, and peak scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.kernels.cases import OURS, Case, Op, Setting, Spec
from bench.kernels.timing import Call, Rates, clock_of, peak_scratch, time_in_turns
from offspec_kernels.backend import choose_backend


def check(spec: Spec, op: Op, setting: Setting) -> dict[str, Any]:
    """Compare the timed path and dtype with the reference at a small size."""
    small = op.shrunk(spec)
    case = op.build(small, replace(setting, rivals=False))
    error = case.error(case.look(case.ways[OURS]), case.look(case.reference))
    passed = error <= case.limit  # False for NaN
    return {"at": str(small), "error": error, "limit": case.limit, "passed": passed}


def working_implementations(case: Case) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """Return the ways that can run, each one's difference from ours, and why the others cannot run."""
    ours = case.look(case.ways[OURS])
    running, apart, failed = {OURS: case.ways[OURS]}, dict[str, float](), dict[str, str]()
    for name, call in case.ways.items():
        if name == OURS:
            continue
        try:
            apart[name] = case.error(case.look(call), ours)
            running[name] = call
        except RuntimeError as error:  # torch has no kernel for these arguments, or memory is full
            failed[name] = str(error).partition("\n")[0]
    return running, apart, failed


def measure(
    spec: Spec, op: Op, setting: Setting, rates: Rates, seconds: float, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the figures of a case, without times if it is wrong. `tell` receives the ceiling before timing.

    Two results may each be off by the limit, so another implementation may differ from ours by twice as much.
    If it differs by more, the case is wrong: both cannot be right.
    """
    checked, path = check(spec, op, setting), choose_backend(setting.device, setting.path)
    row: dict[str, Any] = {"case": str(spec), "path": path, "checked": checked}
    if not checked["passed"]:
        return {**row, "right": False}
    case = op.build(spec, setting)
    products, memory = rates.seconds(case.flops, case.nbytes, spec.dtype)
    row |= {
        "flops": case.flops,
        "nbytes": case.nbytes,
        "products_seconds": products,
        "memory_seconds": memory,
        "ceiling_seconds": max(products, memory),
        "bound_by": "products" if products > memory else "memory",
    }
    tell(row)
    running, apart, failed = working_implementations(case)
    row |= {"rivals_differ_by": apart, "failed": failed, **case.facts}
    if not all(error <= 2 * case.limit for error in apart.values()):
        return {**row, "right": False}
    timings = time_in_turns(running, clock_of(setting.device), seconds)
    return {
        **row,
        "right": True,
        "ways": {name: timing.to_json() for name, timing in timings.items()},
        "scratch_bytes": peak_scratch(case.ways[OURS], setting.device),
        "scratch_stated": op.stated_scratch(),
    }
