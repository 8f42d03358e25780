"""Evaluation of a GPU, in two calls of under five minutes.

    python -m bench.gpu_day --call a     facts, link, products, exactness, doctor, tests, kernels
    python -m bench.gpu_day --call b     real text, models with memory limits and slower links, a peer
    python -m bench.gpu_day --dry        every step at a toy size, without a GPU

Each step is a process with its own time limit, so a step that hangs or fails does not affect the others. The
record is rewritten after each step. README.md in this folder lists what a machine without a network needs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from bench.gpu_day.machine import output
from bench.gpu_day.step_context import StepContext, write_json
from bench.gpu_day.steps import STEPS
from bench.lib.cgroup import BenchError
from bench.lib.command import Command
from bench.lib.process import ROOT
from bench.lib.report import Report, environment

_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")  # removed from the record: folders identify a machine
_LEAST_SECONDS = 8  # a step is not started with less time than this


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--call", choices=("a", "b"), help="only the steps of one call (default: all)")
    p.add_argument(
        "--steps", nargs="+", choices=list(STEPS), metavar="STEP", help=f"only these: {', '.join(STEPS)}"
    )
    p.add_argument("--seconds", type=float, default=1e6, help="time for all steps; later steps are skipped")
    p.add_argument("--models", type=Path, help="folder for generated models (default: a tmpfs)")
    p.add_argument("--carried", type=Path, default=Path(".gpu_day"), help="folder of the demo model's pieces")
    p.add_argument("--dry", action="store_true", help="use toy sizes, on the CPU or a simulated GPU")


def measure(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Run the steps; return their states. Raises BenchError without a GPU, unless dry."""
    if not args.dry and shutil.which("nvidia-smi") is None:
        raise BenchError(
            "this machine has no NVIDIA driver (nvidia-smi): add --dry to try every step without a GPU"
        )
    names = args.steps or [name for name, step in STEPS.items() if args.call in (None, step.call)]
    report.ceiling(
        f"{args.seconds:.0f} s for {len(names)} steps" if args.seconds < 1e6 else f"{len(names)} steps"
    )
    with tempfile.TemporaryDirectory(prefix="gpu_day-") as scratch:
        models = args.models or (Path(scratch) if args.dry else _memory_folder())
        models.mkdir(parents=True, exist_ok=True)
        began, found = time.monotonic(), dict[str, Any]()
        record = {"bench": "gpu_day", "command": report.command, "dry": args.dry}
        record["environment"] = environment("simulated" if args.dry else _gpu_name())
        for name in names:
            left = args.seconds - (time.monotonic() - began)
            limit = min(STEPS[name].seconds * (3 if args.dry else 1), left)
            if limit < _LEAST_SECONDS:
                found[name] = {"state": "skipped", "error": "no time left"}
            else:
                context = StepContext(args.dry, models, args.carried.resolve(), limit)
                found[name] = _run(name, context, Path(scratch) / f"{name}.json")
            write_json(report.file(), {**record, "steps": found})
            report.reached(_line(name, found[name]))
    if any(row["state"] != "ok" for row in found.values()):
        report.missed("a step failed, was stopped or was skipped: see its `error` and `log` in the record")
    return {"bench": "gpu_day", "steps": {name: row["state"] for name, row in found.items()}}


def _line(name: str, row: dict[str, Any]) -> str:
    words = row.get("short", "") if row["state"] == "ok" else row["error"]
    return f"{name}: {row['state']} in {row.get('seconds', 0)} s  {words}"


def _gpu_name() -> str:
    """Return the driver's name of the GPU, without a CUDA context, which would take memory from the steps."""
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    return output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").split("\n")[0]


def _memory_folder() -> Path:
    """Return a tmpfs for models, so that they are written and read at the speed of memory."""
    folder = Path("/mnt/gpu_day")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(folder):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100g", "tmpfs", str(folder)], check=False)
    return folder


def _run(name: str, context: StepContext, part: Path) -> dict[str, Any]:
    """Run a step in its own process group; return results, state and seconds, and its log if it failed."""
    log, began = part.with_suffix(".log"), time.monotonic()
    words = [sys.executable, "-m", "bench.gpu_day", "--child", name, context.settings(), str(part)]
    around = _environment(name, context)
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=around, start_new_session=True
        )
        try:
            code = process.wait(context.seconds)
            state = "ok" if code == 0 else "failed"
        except BaseException as late:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(late, subprocess.TimeoutExpired):
                raise
            state = "stopped"
    found = _without_folders(json.loads(part.read_text("utf-8"))) if part.exists() else {}
    if state == "ok" and "error" in found:
        state = "failed"
    row = {"state": state, "seconds": round(time.monotonic() - began, 1), **found}
    if state != "ok":
        row["log"] = _without_folders(log.read_text("utf-8", "replace")[-6000:])
        row.setdefault("error", "over its time limit" if state == "stopped" else row["log"].strip()[-300:])
    return row


def _without_folders(found: Any) -> Any:
    """Return the value with folders removed from the paths in all texts."""
    if isinstance(found, str):
        return _FOLDERS.sub("", found)
    if isinstance(found, dict):
        return {_without_folders(name): _without_folders(value) for name, value in found.items()}
    return [_without_folders(value) for value in found] if isinstance(found, list) else found


def _environment(name: str, context: StepContext) -> dict[str, str]:
    """Return the variables of a step: packages of this checkout first, a separate cache."""
    paths = [str(ROOT / folder) for folder in ("", "kernels", "planners")]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    found["OFFSPEC_CACHE"] = str(context.models / "cache")
    if context.dry:
        found |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        if STEPS[name].simulated:
            found["GPU_DAY_SIMULATED"] = "1"
    return found


def run_child(name: str, settings: str, part: Path) -> int:
    """Run one step, in its own process."""
    context = StepContext.of(settings)
    context.save = lambda: write_json(part, context.found)
    if os.environ.get("GPU_DAY_SIMULATED"):
        from tests.support.simulated_cuda.install import install_machine
        from tests.support.simulated_cuda.kernels import install_kernels

        install_machine("eager", total=4 << 30)
        install_kernels()
    faulthandler.dump_traceback_later(max(context.seconds - 3, 1))  # shows where a stopped step was
    try:
        STEPS[name].load()(context)
    except Exception as error:
        traceback.print_exc()
        context.found["error"] = f"{type(error).__name__}: {error}"[:2000]
    context.save()
    return int("error" in context.found)


main = Command("gpu_day", __doc__ or "", options, measure)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(run_child(sys.argv[2], sys.argv[3], Path(sys.argv[4])))
    sys.exit(main())
