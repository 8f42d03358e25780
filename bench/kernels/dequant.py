"""Speed of dequantization, relative to memory bandwidth.

    python -m bench.kernels.dequant [--device cuda] [--formats nf4 Q4_K ...] [--threads 1 2]

A random matrix in each format is dequantized to bfloat16, into reused scratch, as when a model runs. Its
packed bytes come from memory, because several copies, larger than any cache, take turns. The ceiling is the
time to write the values or to read the packed bytes, whichever is longer. Before anything is timed, a small
matrix is compared with the format's reference.
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor

from bench.kernels.timing import clock_of, device_name, find_timed_device, time_in_turns, variant_of
from bench.lib.cgroup import BenchError
from bench.lib.command import Command
from bench.lib.report import Report
from offspec.core.errors import RequestError
from offspec_kernels.dequant import Format, Part, dequantize
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.float4 import Mxfp4, Nvfp4
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.ggml import LAYOUTS, Ggml
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.grouped import BITS, Grouped
from offspec_kernels.dequant.int8rows import Int8Rows
from offspec_planners.measure.processor import memory_bandwidth
from offspec_planners.units import format_bytes

AIM = 2e9  # packed bytes per second on one core, if the arithmetic allows it
_CHECKED = (256, 512)
_COPIES_BYTES = 128 << 20
GROUP = 128  # inputs that share a scale, as in most checkpoints of AWQ, GPTQ and llm-compressor

FORMATS: dict[str, Format] = {
    **{f"int{bits}-g64": Grouped(bits) for bits in BITS},
    "nf4": Codebook("nf4", absmax=torch.float16),
    "bnb-nf4": Codebook("nf4", dtype=torch.bfloat16),
    "bnb-nf4-nested": Codebook("nf4", absmax=torch.uint8, nested=256, dtype=torch.bfloat16),
    "bnb-fp4": Codebook("fp4", dtype=torch.bfloat16),
    "bnb-int8": Int8Rows(),
    "awq": Awq(GROUP),
    **{f"gptq-int{bits}": Gptq(bits, GROUP, act_order=False) for bits in (2, 3, 4, 8)},
    "gptq-int4-act-order": Gptq(4, GROUP, act_order=True),
    "ct-int4": CompressedInt(4, packed=True, group=GROUP, zero_point=False),
    "ct-int4-zeros": CompressedInt(4, packed=True, group=GROUP, zero_point=True),
    "ct-int8": CompressedInt(8, packed=False, group=None, zero_point=False),
    "ct-fp8": Float8(None, "channel", torch.bfloat16),
    "fp8-blocks": Float8((128, 128), "block", rounded=False),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    **{kind: Ggml(kind) for kind in LAYOUTS},
}


def random_parts(format: Format, shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return a weight of random codes and scales."""
    random = torch.Generator().manual_seed(0)
    parts = {name: _random(part, random) for name, part in format.parts(shape).items()}
    if "g_idx" in parts:
        parts["g_idx"] = torch.randperm(shape[1], generator=random).int() // GROUP
    return {name: part.to(device) for name, part in parts.items()}


def packed_bytes(parts: dict[str, Tensor]) -> int:
    return sum(part.nbytes for part in parts.values())


def _random(part: Part, random: torch.Generator) -> Tensor:
    if part.dtype.is_floating_point and part.dtype.itemsize > 1:
        return (torch.rand(part.shape, generator=random) + 0.5).to(part.dtype)
    # Any two such bytes form a finite, normal float16, wherever a block has its scales. Other values can be
    # slower on a processor, and do not occur in real weights.
    nbytes = torch.Size(part.shape).numel() * part.dtype.itemsize
    codes = torch.randint(0x20, 0x60, (nbytes,), dtype=torch.uint8, generator=random)
    return codes.view(part.dtype).view(part.shape)


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--formats", nargs="+", choices=FORMATS, metavar="FORMAT", default=list(FORMATS),
                   help=f"only these formats: {', '.join(FORMATS)}")  # fmt: skip
    p.add_argument("--rows", type=int, default=3072)
    p.add_argument("--columns", type=int, default=3072)
    p.add_argument("--threads", type=int, nargs="+", help="numbers of threads (default: one, and all)")
    p.add_argument("--seconds", type=float, default=0.1, help="seconds of each of five turns (default 0.1)")


def measure_ceiling(values: int, device: torch.device, seconds: float) -> dict[str, float]:
    """Return the rates, in bytes per second, of reading memory and of repeatedly writing `values` bfloat16
    values to scratch, with torch's current number of threads."""
    scratch = torch.empty(values, dtype=torch.bfloat16, device=device)
    timing = time_in_turns({"fill": lambda: scratch.fill_(1)}, clock_of(device), seconds)["fill"]
    read = memory_bandwidth(str(device)).high
    return {"write_bytes_per_s": scratch.nbytes / timing.least, "read_bytes_per_s": read}


def check(name: str, format: Format, device: torch.device) -> None:
    """Raise BenchError unless the timed implementation gives the reference's values."""
    rows, columns = _CHECKED
    parts = random_parts(format, _CHECKED, device)
    out = torch.full((2, rows * columns), torch.nan, dtype=torch.bfloat16, device=device)
    found = dequantize(format, parts, _CHECKED, out[0])
    wanted = dequantize(format, parts, _CHECKED, out[1], path="reference")
    if not torch.equal(found, wanted):
        raise BenchError(f"{name} differs from its reference, so it was not timed")


def measure(
    name: str, shape: tuple[int, int], device: torch.device, ceiling: dict[str, float], seconds: float
) -> dict[str, Any]:
    """Measure one format with torch's current number of threads."""
    format, values = FORMATS[name], shape[0] * shape[1]
    parts = random_parts(format, shape, device)
    nbytes = packed_bytes(parts)
    copies = [parts]
    if device.type == "cpu":  # on a CUDA device, timing empties the cache
        for _ in range(_COPIES_BYTES // nbytes):
            copies.append({part: tensor.clone() for part, tensor in parts.items()})
    turn = cycle(copies)
    out = torch.empty(values, dtype=torch.bfloat16, device=device)
    calls = {"unpack": lambda: dequantize(format, next(turn), shape, out)}
    timing = time_in_turns(calls, clock_of(device), seconds)["unpack"]
    floor = max(out.nbytes / ceiling["write_bytes_per_s"], nbytes / ceiling["read_bytes_per_s"])
    return {
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        **timing.to_json(),
        "packed_bytes_per_s": nbytes / timing.seconds,
        "weights_per_s": values / timing.seconds,
        "floor_seconds": floor,
        "ratio": floor / timing.seconds,
    }


def measure_all(args: argparse.Namespace, device: torch.device, report: Report) -> dict[str, Any]:
    """Return ceilings and rows for each number of threads."""
    shape, before = (args.rows, args.columns), torch.get_num_threads()
    wanted = args.threads or sorted({1, before}) if device.type == "cpu" else [before]
    ceilings, runs = [], {name: list[dict[str, Any]]() for name in args.formats}
    try:
        for threads in wanted:
            torch.set_num_threads(threads)
            ceiling = measure_ceiling(args.rows * args.columns, device, args.seconds)
            ceilings.append({"threads": threads, **ceiling})
            report.ceiling(
                f"{_on(device, threads)}: bfloat16 written at {format_bytes(ceiling['write_bytes_per_s'])}/s"
                f", memory read at {format_bytes(ceiling['read_bytes_per_s'])}/s"
            )
            for name in args.formats:
                report.progress(f"{name}, {_on(device, threads)}")
                runs[name].append(measure(name, shape, device, ceiling, args.seconds))
    finally:
        torch.set_num_threads(before)
    rows = []
    for name, found in runs.items():
        stored = FORMATS[name].parts(shape).values()
        size = sum(part.dtype.itemsize * math.prod(part.shape) for part in stored)
        bits = 8 * size / math.prod(shape)
        rows.append({"format": name, "bits_per_weight": bits, "packed_bytes": size, "runs": found})
    return {"ceilings": ceilings, "formats": rows}


def _on(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "one core" if threads == 1 else f"{threads} cores"


def show(found: dict[str, Any], device: torch.device, report: Report) -> None:
    """Print a row for each format; the ratio is the ceiling's share of the time."""
    heads = [(_on(device, one["threads"]), "weights/s", "ratio") for one in found["ceilings"]]
    rows = []
    for row in found["formats"]:
        cells = [row["format"], f"{row['bits_per_weight']:.2f}"]
        for run in row["runs"]:
            cells.append(f"{format_bytes(run['packed_bytes_per_s'])}/s")
            cells += [f"{run['weights_per_s'] / 1e9:.2f} G", f"{run['ratio']:.2f}"]
        rows.append(cells)
    report.table("packed bytes per second, to bfloat16", ("", "bits per weight", *chain(*heads)), rows)


def below_aim(found: dict[str, Any]) -> list[str]:
    """Return the formats that one core dequantizes at less than AIM."""
    return [
        row["format"]
        for row in found["formats"]
        if any(run["threads"] == 1 and run["packed_bytes_per_s"] < AIM for run in row["runs"])
    ]


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Check, time and report every format."""
    if args.seconds < 0 or min(args.threads or [1]) < 1:
        raise RequestError("--seconds must be 0 or more, and --threads 1 or more")
    device = find_timed_device(args.device)
    report.progress("comparing with the references")
    for name in args.formats:
        check(name, FORMATS[name], device)
    found = measure_all(args, device, report)
    show(found, device, report)
    short = below_aim(found)
    if short:
        report.note(f"under {format_bytes(AIM)}/s on one core: {', '.join(short)}")
    shape = [args.rows, args.columns]
    about = {**report.head(args), "device": device.type, "shape": shape, "aim_bytes_per_s": AIM}
    summary = {**about, **found, "below_aim": short}
    report.record(summary, device=device_name(device), variant=variant_of(device))
    return summary


main = Command("dequant", "Speed of dequantization.", options, bench, module="kernels.dequant")

if __name__ == "__main__":
    sys.exit(main())
