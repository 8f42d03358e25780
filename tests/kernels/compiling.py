"""Compiles every kernel as its launcher calls it, for GPUs that need not be there; run as a script.

    python -m tests.kernels.compiling [--all] 80 89 90 120

Prints a line of JSON for each kernel, call and architecture: the shared memory and the stack that a program
takes, and the fused float64 operations in it. Not under pytest, whose process runs kernels in Python.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from offspec_kernels.dequant import Format
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.dequant.ggml.layout import LAYOUTS
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.grouped import BITS, Grouped
from offspec_kernels.dequant.int8rows import Int8Rows
from offspec_kernels.gumbel_argmax.rows import Work
from offspec_kernels.gumbel_argmax.triton import pick
from offspec_kernels.kv_compact import KVTable
from offspec_kernels.kv_compact.triton import move
from offspec_kernels.noise.triton import fill_rows
from offspec_kernels.row_linear.triton import row_linear
from offspec_kernels.topk_children.triton import children
from offspec_kernels.tree_attention import Chunk
from offspec_kernels.tree_attention.triton import attend
from offspec_kernels.tree_attention.triton_exact import attend as attend_exact
from offspec_kernels.tree_conv.triton import tree_conv
from offspec_kernels.tree_scan import walk_order
from offspec_kernels.tree_scan.triton import tree_scan
from tests.kernels.trees import Shape, make_case

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Absent:
    """A GPU to compile for, and nothing more."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # so that nothing compiled for another one is taken

    def get_current_stream(self, device: int) -> int:
        return 0


def _formats() -> Iterator[Format]:
    """All that make a kernel take another shape."""
    yield from map(Ggml, LAYOUTS)
    yield Ggml("Q4_K", heads=4)
    yield from map(Grouped, BITS)
    yield Codebook("nf4", 64, torch.uint8, 256, 0.1, torch.float16)
    yield Codebook("fp4", 32, torch.float16, dtype=torch.bfloat16)
    yield Int8Rows()
    yield Awq(32)
    yield Gptq(4, 32, False, scales=torch.bfloat16)
    yield Gptq(3, 32, True)
    yield CompressedInt(4, True, 32, True)
    yield CompressedInt(3, True, 32, False, act_order=True, scales=torch.float32)
    yield CompressedInt(8, False, 0, True, scales=torch.float16)
    yield Float8((128, 128), "block", rounded=False)
    yield Float8(None, "channel", torch.bfloat16)


def _scans(thorough: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """A decay for each head, for each number of a key, and for each number of a state."""
    order, rows = walk_order([-1, 0, 0]), 3
    for size, width in ((128, 128), (256, 256), (64, 64), (1024, 64)) if thorough else ((128, 128),):
        given = torch.zeros(rows, 1, size), torch.zeros(rows, 1, size), torch.zeros(rows, 2, width)
        state, beta, out = torch.zeros(2, size, width), torch.zeros(rows, 2), torch.zeros(rows, 2, width)
        for decay in (torch.zeros(rows, 2), torch.zeros(rows, 2, size)):
            for delta in (None, beta):
                name = f"tree_scan {size} {decay.dim()} {delta is not None}"
                yield name, partial(tree_scan, *given, decay, delta, None, state, order, out, state)
    state, key, value = torch.zeros(1, 16, 4096), torch.zeros(rows, 1, 16), torch.zeros(rows, 1, 4096)
    yield (
        "tree_scan rates",
        partial(tree_scan, key, key, value, value, None, state, state, order, value, state),
    )


def _calls(thorough: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every launcher; thoroughly, with all that makes its kernels take another shape."""
    for dtype in (torch.bfloat16, torch.float32) if thorough else (torch.bfloat16,):
        for size in (64, 128, 256) if thorough else (128,):
            kinds = ((80, 900, 5.0), (80, Chunk(900), None), (80, None, None), (1, None, None))
            for rows, window, softcap in kinds if thorough else (kinds[0], *kinds[2:]):
                sizes = (size, size)
                case = make_case([Shape(2000, 0, rows, rows)], heads=(8, 1), sizes=sizes, dtype=dtype)
                arguments: list[Any] = [
                    case.query,
                    case.key,
                    case.value,
                    case.tree_mask,
                    0.1,
                    window,
                    softcap,
                ]
                arguments += [None, torch.empty_like(case.query)]
                name = f"tree_attention {dtype} {size} {rows} {window} {softcap}"
                yield name, partial(attend, *arguments)
                yield f"exact {name}", partial(attend_exact, *arguments)
        for rows in (1, 300):
            weight, bias = torch.zeros(512, 512, dtype=dtype), torch.zeros(512, dtype=dtype)
            given = torch.zeros(rows, 512, dtype=dtype)
            yield f"row_linear {dtype} {rows}", partial(row_linear, given, weight, bias)
        logits = torch.zeros(3, 128256, dtype=dtype)
        least, tie = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
        noisy = Work(logits, 1, [4, 4, 5], 0.7, least, tie, None)
        kept = torch.zeros(64, 128256)
        yield f"gumbel_argmax {dtype}", partial(pick, noisy)
        yield f"gumbel_argmax {dtype}, noise at hand", partial(pick, noisy._replace(table=kept))
        for count in (8, 32) if thorough else (32,):
            yield (
                f"topk_children {dtype} {count}",
                partial(children, logits, count, 1, [4, 4, 5], 0.8),
            )
            yield (
                f"topk_children {dtype} {count}, noise at hand",
                partial(children, logits, count, 1, [4, 4, 5], 0.8, kept),
            )
        yield f"noise {dtype}", partial(fill_rows, kept, 1, 4, 9)
        for format in _formats():
            shape = (64, 256)
            parts = {
                name: torch.zeros(part.shape, dtype=part.dtype) for name, part in format.parts(shape).items()
            }
            out = torch.zeros(shape, dtype=dtype)
            yield f"dequant {format.name} {dtype}", partial(format.triton, parts, shape, out)
        taps, takes = torch.zeros(512, 4, dtype=dtype), torch.zeros(5, 4, dtype=torch.int64)
        shift, given = torch.zeros(512, dtype=dtype), torch.zeros(9, 512, dtype=dtype)
        yield f"tree_conv {dtype}", partial(tree_conv, given, takes, taps, shift)
    yield from _scans(thorough)
    table = KVTable([torch.zeros(8, 90, 128)])
    yield "kv_compact", partial(move, table, 3, [4, 7])


def _report(name: str, kernel: Any) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    found = {
        "call": name,
        "kernel": kernel.name,
        "architecture": kernel.metadata.target.arch,
        "shared": kernel.metadata.shared,
        "stack": int(stack[1]) if stack else 0,
        "fused_float64": kernel.asm["ptx"].count("fma.rn.f64"),
    }
    print(json.dumps(found), flush=True)


def main(architectures: list[int], thorough: bool) -> None:
    assert not os.environ.get("TRITON_INTERPRET"), "kernels must be compiled, not interpreted"
    run = JITFunction.run
    name = ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        _report(name, run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    for architecture in architectures:
        triton.runtime.driver.set_active(_Absent(architecture))
        for name, call in _calls(thorough):  # noqa: B007 - told by compile_only
            call()


if __name__ == "__main__":
    words = sys.argv[1:]
    main([int(word) for word in words if word != "--all"], "--all" in words)
