"""Steps that run a program of the project: doctor, the tests marked gpu, the kernel benches."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu_day.step_context import StepContext

_TESTED = [
    f"tests/{folder}"
    for folder in ("kernels", "sampling", "stream", "model", "draft", "engine", "plan", "planners")
]
# Warnings of other versions and plugins are not treated as errors.
_OWN_WARNINGS = ("-W", "default", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:jaxtyping")
_SHAPES = (
    "tree_attention:2048,256,64,8,128:bfloat16",
    "tree_attention:8192,512,64,8,128:bfloat16",
    "tree_attention:32768,1024,64,8,128:bfloat16",
    "kv_compact:80,8,1024,128,12:bfloat16",
    "gumbel_argmax:512,128256:bfloat16",
    "topk_children:32,128256,32:bfloat16",
)


def doctor(context: StepContext) -> None:
    result = _run(context, "-m", "offspec", "doctor", "--json")
    try:
        context.found["doctor"] = json.loads(result["out"])
    except ValueError:
        context.found |= {"out": result["out"][-4000:], "err": result["err"][-3000:]}
    context.found["code"] = result["code"]
    _require(context, result, (0, 1))


def tests(context: StepContext) -> None:
    """Run the tests marked gpu, in twelve processes; in a dry run only collect them."""
    failures = context.models / "failures.jsonl"
    failures.unlink(missing_ok=True)
    words = ["-m", "bench.gpu_day.programs", str(failures), "-q", "-m", "gpu and not slow and not exhaustive"]
    words += ["--collect-only"] if context.dry else ["-n", "12", "--dist", "worksteal", "--tb", "short"]
    result = _run(context, *words, "--durations", "25", *_OWN_WARNINGS, *_TESTED)
    out = result["out"]
    context.found |= {"tail": out[-9000:], "err": result["err"][-1500:], "code": result["code"]}
    if failures.exists():
        context.found["failures"] = [json.loads(line) for line in failures.read_text("utf-8").splitlines()]
    context.found["short"] = (out.strip().splitlines() or result["err"].strip().splitlines() or ["nothing"])[
        -1
    ]
    _require(context, result, (0,))


def kernels(context: StepContext) -> None:
    shapes = ("tree_attention:30,7,4,2,16",) if context.dry else _SHAPES
    _bench(context, "bench.kernels", "--seconds", "0.02" if context.dry else "0.05", "--shapes", *shapes)


def dequant(context: StepContext) -> None:
    sizes = (
        ("--formats", "nf4", "--rows", "256", "--columns", "256")
        if context.dry
        else ("--rows", "8192", "--columns", "8192")
    )
    _bench(context, "bench.kernels.dequant", "--seconds", "0.02", *sizes)


def _bench(context: StepContext, module: str, *words: str) -> None:
    record = context.models / f"{module}.json"
    device = () if context.dry else ("--device", "cuda")
    result = _run(context, "-m", module, *words, *device, "--json", str(record))
    context.found |= {"out": result["out"][-9000:], "err": result["err"][-2000:], "code": result["code"]}
    if record.exists():
        context.found["record"] = json.loads(record.read_text("utf-8"))
    _require(context, result, (0, 1))  # 1: a target was missed


def _require(context: StepContext, result: dict[str, Any], codes: tuple[int, ...]) -> None:
    if result["code"] not in codes:
        context.found["error"] = (
            f"exit code {result['code']}: {(result['err'] or result['out']).strip()[-300:]}"
        )


def _run(context: StepContext, *words: str) -> dict[str, Any]:
    """Run a Python program within the step's time; its output goes to files, which a timeout keeps."""
    out, err = (context.models / f"out-{time.monotonic_ns()}.{name}" for name in ("out", "err"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as first, err.open("wb") as second:
        process = subprocess.Popen([sys.executable, *words], stdout=first, stderr=second)
        try:
            code = process.wait(context.seconds - 4)
        except subprocess.TimeoutExpired:
            process.kill()
            code = 124
    return {"code": code, "out": _text(out), "err": _text(err)}


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace")


class Failures:
    """pytest plugin that writes each failure at once, so that a stopped run has them."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self._file.open("a") as out:
                text = report.longreprtext.strip()
                out.write(
                    json.dumps({"test": report.nodeid, "when": report.when, "text": text[-1500:]}) + "\n"
                )


def run_tests(file: str, *words: str) -> int:
    """Run pytest with these arguments; failures go to `file`."""
    import pytest

    return int(pytest.main(list(words), plugins=[Failures(Path(file))]))


if __name__ == "__main__":
    sys.exit(run_tests(*sys.argv[1:]))
