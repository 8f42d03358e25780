"""One case of the kernels bench: checked at a small size, timed with its rivals, its scratch watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.kernels.cases import OURS, Case, Op, Setting, Spec
from bench.kernels.clock import Call, Rates, clock_of, peak_scratch, time_in_turns
from offspec_kernels.backend import choose_backend


def check(spec: Spec, op: Op, setting: Setting) -> dict[str, Any]:
    """How far the very path and dtype that will be timed are from the reference, at a small size."""
    small = op.shrunk(spec)
    case = op.build(small, replace(setting, rivals=False))
    error = case.error(case.look(case.ways[OURS]), case.look(case.reference))
    passed = error <= case.limit  # which NaN is not
    return {"at": str(small), "error": error, "limit": case.limit, "passed": passed}


def agreeing(case: Case) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """The ways that can run, how far each rival's result is from ours, and why the others cannot run."""
    ours = case.look(case.ways[OURS])
    running, apart, failed = {OURS: case.ways[OURS]}, dict[str, float](), dict[str, str]()
    for name, call in case.ways.items():
        if name == OURS:
            continue
        try:
            apart[name] = case.error(case.look(call), ours)
            running[name] = call
        except RuntimeError as error:  # no kernel of torch's for these arguments, or no memory
            failed[name] = str(error).partition("\n")[0]
    return running, apart, failed


def measure(
    spec: Spec, op: Op, setting: Setting, rates: Rates, seconds: float, tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The figures of a case; without times where it is wrong. `tell` hears of the ceiling before it is timed.

    Two results may each be off by the limit, so rivals may differ from ours by twice as much. One that
    differs by more makes the case wrong: they cannot both be right.
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
    running, apart, failed = agreeing(case)
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
