"""Steps that run a program of the project: doctor, the tests marked gpu, the benches of kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu_day.day import Day

_TESTED = [
    f"tests/{folder}"
    for folder in ("kernels", "sampling", "stream", "model", "draft", "engine", "plan", "planners")
]
# Warnings of other versions and plugins are not errors there.
_OWN_WARNINGS = ("-W", "default", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:jaxtyping")
_SHAPES = (
    "tree_attention:2048,256,64,8,128:bfloat16",
    "tree_attention:8192,512,64,8,128:bfloat16",
    "tree_attention:32768,1024,64,8,128:bfloat16",
    "kv_compact:80,8,1024,128,12:bfloat16",
    "gumbel_argmax:512,128256:bfloat16",
    "topk_children:32,128256,32:bfloat16",
)


def doctor(day: Day) -> None:
    told = _run(day, "-m", "offspec", "doctor", "--json")
    try:
        day.found["doctor"] = json.loads(told["out"])
    except ValueError:
        day.found |= {"out": told["out"][-4000:], "err": told["err"][-3000:]}
    day.found["code"] = told["code"]
    _require(day, told, (0, 1))


def tests(day: Day) -> None:
    """The tests marked gpu, in twelve processes; in a dry run they are only collected."""
    failures = day.models / "failures.jsonl"
    failures.unlink(missing_ok=True)
    words = ["-m", "bench.gpu_day.programs", str(failures), "-q", "-m", "gpu and not slow and not exhaustive"]
    words += ["--collect-only"] if day.dry else ["-n", "12", "--dist", "worksteal", "--tb", "short"]
    told = _run(day, *words, "--durations", "25", *_OWN_WARNINGS, *_TESTED)
    out = told["out"]
    day.found |= {"tail": out[-9000:], "err": told["err"][-1500:], "code": told["code"]}
    if failures.exists():
        day.found["failures"] = [json.loads(line) for line in failures.read_text("utf-8").splitlines()]
    day.found["short"] = (out.strip().splitlines() or told["err"].strip().splitlines() or ["nothing"])[-1]
    _require(day, told, (0,))


def kernels(day: Day) -> None:
    shapes = ("tree_attention:30,7,4,2,16",) if day.dry else _SHAPES
    _bench(day, "bench.kernels", "--seconds", "0.02" if day.dry else "0.05", "--shapes", *shapes)


def dequant(day: Day) -> None:
    sizes = (
        ("--formats", "nf4", "--rows", "256", "--columns", "256")
        if day.dry
        else ("--rows", "8192", "--columns", "8192")
    )
    _bench(day, "bench.kernels.dequant", "--seconds", "0.02", *sizes)


def _bench(day: Day, module: str, *words: str) -> None:
    record = day.models / f"{module}.json"
    device = () if day.dry else ("--device", "cuda")
    told = _run(day, "-m", module, *words, *device, "--json", str(record))
    day.found |= {"out": told["out"][-9000:], "err": told["err"][-2000:], "code": told["code"]}
    if record.exists():
        day.found["record"] = json.loads(record.read_text("utf-8"))
    _require(day, told, (0, 1))  # 1: an aim was missed


def _require(day: Day, told: dict[str, Any], codes: tuple[int, ...]) -> None:
    if told["code"] not in codes:
        day.found["error"] = f"exit code {told['code']}: {(told['err'] or told['out']).strip()[-300:]}"


def _run(day: Day, *words: str) -> dict[str, Any]:
    """A Python program within the step's time; what it printed stays in files, so that a late one is kept."""
    out, err = (day.models / f"out-{time.monotonic_ns()}.{name}" for name in ("out", "err"))
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as first, err.open("wb") as second:
        process = subprocess.Popen([sys.executable, *words], stdout=first, stderr=second)
        try:
            code = process.wait(day.seconds - 4)
        except subprocess.TimeoutExpired:
            process.kill()
            code = 124
    return {"code": code, "out": _text(out), "err": _text(err)}


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace")


class Failures:
    """A plugin of pytest that writes each failure at once, so that a run that is stopped tells them, too."""

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
    """Run pytest with these words; failures go to `file`."""
    import pytest

    return int(pytest.main(list(words), plugins=[Failures(Path(file))]))


if __name__ == "__main__":
    sys.exit(run_tests(*sys.argv[1:]))
