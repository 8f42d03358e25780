"""GPU resources of every kernel: registers, shared memory, and stack used for spilled registers.

    python -m bench.kernels.compiled [--architectures 86 89] [--ops tree_scan ...] [--quick]

All variants that launchers can request are compiled with the ptxas of Triton's wheel; the GPUs need not be
present. The ceiling is the shared memory available to one program; a program that needs more cannot be
launched. Bytes of stack are spilled registers, which are slow but work; kernels that spill are listed. The
exit code is 1 if a program needs too much, or fuses a product of noise that must be rounded twice.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.lib.command import Command
from bench.lib.report import Report
from offspec.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU properties that launchers query: number of processors, and bytes of shared memory per program."""

    name: str
    processors: int
    shared: int


GPUS = {
    80: Gpu("A100", 108, 163 << 10),
    86: Gpu("RTX 3090", 82, 99 << 10),
    89: Gpu("RTX 4090", 128, 99 << 10),
    90: Gpu("H100", 132, 227 << 10),
    120: Gpu("RTX 5090", 170, 99 << 10),
}


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel compiled for one call. shared and stack in bytes; registers per thread."""

    op: str
    variant: str
    kernel: str
    architecture: int
    registers: int
    stack: int
    shared: int
    fused_float64: int

    @property
    def fits(self) -> bool:
        return self.shared <= GPUS[self.architecture].shared


def compile_all(architecture: int, ops: list[str] | None, quick: bool) -> Iterator[Program]:
    """Compile for one architecture; yield each program once, even if several calls lead to it."""
    import triton
    from triton.runtime.jit import JITFunction

    from bench.kernels import variants
    from offspec_kernels.tree_attention import triton as attention

    gpu = GPUS[architecture]
    made = list[Any]()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made.append(run(self, *args, grid=grid, warmup=True, **options))
        return made[-1]

    seen, device = set[str](), attention._device
    JITFunction.run = compile_only
    attention._device = lambda device: (gpu.processors, gpu.shared)
    triton.runtime.driver.set_active(_CompileTarget(architecture))
    try:
        for variant in variants.quick_variants() if quick else variants.all_variants():
            if ops and variant.op.split()[0] not in ops:
                continue
            variant.call()
            while made:
                program = made.pop(0)
                if program.hash not in seen:
                    seen.add(program.hash)
                    yield _measured(variant.op, variant.name, program)
    finally:
        JITFunction.run, attention._device = run, device


class _CompileTarget:
    """Stand-in for a Triton driver that only names a GPU to compile for."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # so that programs compiled for another one are not reused

    def get_current_stream(self, device: int) -> int:
        return 0


def _measured(op: str, variant: str, program: Any) -> Program:
    """Return the resources of a compiled program, read with cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    fused, held = program.asm["ptx"].count("fma.rn.f64"), (found["REG"], found["STACK"])
    architecture, shared = program.metadata.target.arch, program.metadata.shared
    return Program(op, variant, program.name, architecture, *held, shared, fused)


def options(p: argparse.ArgumentParser) -> None:
    names = ", ".join(f"{number} ({gpu.name})" for number, gpu in GPUS.items())
    p.add_argument("--architectures", nargs="+", type=int, default=list(GPUS), help=f"any of {names}")
    p.add_argument("--ops", nargs="+", help="only these operations, such as tree_scan")
    p.add_argument("--quick", action="store_true", help="one call of each operation")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Compile; report for each architecture and operation the largest values and the spills."""
    if unknown := set(args.architectures) - GPUS.keys():
        raise RequestError(f"unknown architecture {min(unknown)}: use one of {', '.join(map(str, GPUS))}")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RequestError("kernels must be compiled, not interpreted: unset TRITON_INTERPRET")
    programs = list[Program]()
    for architecture in args.architectures:
        report.progress(f"compiling for sm_{architecture}")
        for program in compile_all(architecture, args.ops, args.quick):
            programs.append(program)
            if not program.fits:
                report.missed(f"{_shown(program)}: needs {program.shared:,} bytes of shared memory, too many")
            if program.fused_float64:
                report.missed(f"{_shown(program)}: {program.fused_float64} fused products in float64")
    if not programs:
        raise RequestError("no kernel matches --ops; see kernels/offspec_kernels for the operations")
    show(programs, report)
    spilt = sorted((one for one in programs if one.stack), key=lambda one: -one.stack)
    summary = {
        **report.head(args, "quick"),
        "limits": {str(number): asdict(GPUS[number]) for number in args.architectures},
        "programs": len(programs),
        "too_large": [asdict(one) for one in programs if not one.fits],
        "spilt": len(spilt),
        "largest": _largest(programs),
    }
    report.record(summary, spills=[asdict(one) for one in spilt])
    return summary


def _shown(program: Program) -> str:
    return f"{program.kernel} for sm_{program.architecture}, {program.op} {program.variant}"


def _largest(programs: list[Program]) -> list[dict[str, Any]]:
    """Return per architecture and kernel the maximum of every value, and the number of spilling programs."""
    groups = defaultdict[tuple[int, str], list[Program]](list)
    for one in programs:
        groups[one.architecture, one.kernel].append(one)
    return [
        {
            "architecture": architecture,
            "kernel": kernel,
            "programs": len(group),
            **{name: max(getattr(one, name) for one in group) for name in ("shared", "registers", "stack")},
            "spilt": sum(one.stack > 0 for one in group),
        }
        for (architecture, kernel), group in groups.items()
    ]


def show(programs: list[Program], report: Report) -> None:
    """Print ceilings and a table of maxima; spills are in the record."""
    for architecture in dict.fromkeys(one.architecture for one in programs):
        gpu = GPUS[architecture]
        report.ceiling(f"sm_{architecture} ({gpu.name}): {gpu.shared:,} bytes of shared memory")
    figures = ("programs", "shared", "registers", "stack", "spilt")
    rows = [
        [f"sm_{row['architecture']} {row['kernel']}", *(f"{row[name]:,}" for name in figures)]
        for row in _largest(programs)
    ]
    heads = ("", "programs", "shared", "registers", "stack", "spilling")
    report.table("maximum of each kernel", heads, rows)


main = Command("kernels-compiled", "GPU resources of kernels.", options, bench, module="kernels.compiled")

if __name__ == "__main__":
    sys.exit(main())
