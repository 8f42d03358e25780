"""How busy the link is while a model streams: passes of 1 to 1,024 tokens beside the raw rate of its files.

    python -m bench.stream [--memory 1.5GB] [--tokens 1 64 256 1024] [--resident 0]
    python -m bench.stream --device cuda --shape 70b --layers 28 --target FOLDER --vram 8GB 12GB 24GB

Target: SmolLM2-135M-Instruct widened ×4 (built on the first run), placed as the engine decides, without a
draft. Readings of the disk and of the processor are taken right before and right after each window of passes,
by which the window is judged: a shared disk changes its speed from minute to minute. The rounds go through
all numbers of tokens in turns. With --device cuda the link is that to the device (`stream_cuda.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib import plots, random_model
from bench.lib.cgroup import BenchError
from bench.lib.report import Report, command_line, environment, write_result
from bench.offload.__main__ import widened
from bench.stream.cuda import describe, measure_cuda, summarise_all
from bench.stream.endurance import endure
from bench.stream.floor import Compute, Floor
from bench.stream.link import RawDisk
from bench.stream.view import shares, show_compute, show_disk, show_endurance, show_row
from bench.stream.window import Passes, Window, run_window
from offspec.core.config import EngineConfig, format_bytes, parse_bytes
from offspec.core.errors import OffspecError

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel
    from offspec_planners.placement import Placement

NAME = "stream"


def find_model(args: argparse.Namespace) -> Path:
    """The folder of the model that is streamed, built if need be."""
    if args.shape:
        if args.target is None:
            raise BenchError("name a folder for the random model with --target: it takes gigabytes")
        shape = random_model.SHAPES[args.shape]
        return random_model.build(replace(shape, layers=args.layers or shape.layers), args.target)
    return widened(args)


def load(args: argparse.Namespace, folder: Path, vram: str | None) -> tuple[LoadedModel, Placement]:
    """The target, placed by the engine within its promise of memory, or as --resident says."""
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel
    from offspec.plan.load import assemble
    from offspec_planners.placement import Placement, spread

    context = max(*args.tokens, 2)
    if args.resident is None:
        config = EngineConfig(
            model=str(folder),
            draft="none",
            memory=parse_bytes(args.memory) if args.memory else None,
            vram=parse_bytes(vram) if vram else None,
            device=args.device,
            dtype=args.dtype,
            context=context,
        )
        assembly = assemble(config, lambda event: None)
        return assembly.target, assembly.placement
    checkpoint = open_checkpoint(str(folder))
    dtype = getattr(torch, args.dtype)
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, torch.device(args.device))
    count = len(target.layers)
    placement = Placement.in_memory(count, spread(count, args.resident), args.slots)
    target.load(placement, context, lambda done, total: None)
    return target, placement


def layer_files(target: LoadedModel, placement: Placement) -> list[Path]:
    """The files of the layers that stream, in the order of the layers."""
    kept = set(placement.resident)
    streamed = [layer for index, layer in enumerate(target.layers) if index not in kept]
    if not streamed:
        raise BenchError("every layer stays in memory, so nothing streams: give less --memory")
    return list(dict.fromkeys(extent.file for layer in streamed for extent in layer.layout.extents))


def run_rounds(
    args: argparse.Namespace,
    passes: Passes,
    read_link: Callable[[], float],
    floor: Callable[[int], Compute],
    report: Report,
) -> list[Window]:
    """All numbers of tokens in turns, round after round."""
    windows: list[Window] = []
    for turn in range(args.rounds):
        for tokens in args.tokens:
            window = run_window(passes, tokens, args.seconds, read_link, floor)
            windows.append(window)
            report.progress(
                f"round {turn + 1}, {tokens} tokens: {window.seconds / window.passes:.3f} s a pass, link "
                f"{format_bytes(window.link)}/s, in use {window.utilisation:.2f}, of bound "
                f"{window.of_bound():.2f}"
            )
    return windows


def measure_cpu(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, Any]:
    """The target in RAM, its layers from disk: what was reached, with every window and reading."""
    from offspec.core import memory

    target, placement = load(args, folder, None)
    try:
        passes = Passes(target, head=str(placement.head) != "device")
        passes.run(max(args.tokens))  # the most memory that any pass takes
        passes.settle()
        peak = memory.peak_bytes()  # of the engine alone: what follows is the bench's own
        files = layer_files(target, placement)
        shape = (args.raw_threads, 4 << 20) if args.raw_threads else None
        raw = RawDisk(files, parse_bytes(args.raw_bytes), shape)
        streamed = sum(target.layer_bytes) - sum(target.layer_bytes[i] for i in placement.resident)
        show_disk(raw, streamed, report)
        floor = Floor(folder, target.dtype, target.device)
        for count in args.tokens:
            show_compute(count, floor.measure(max(count, 2)), floor.flops_per_row, report)

        windows = run_rounds(args, passes, raw.read, lambda tokens: floor.measure(max(tokens, 2)), report)
        where = describe(target, placement)
    finally:
        target.close()
    rows = summarise_all(windows)
    for row in rows:
        show_row(row, "disk", report)
    return {
        "placement": where,
        "raw": {
            "direct": raw.direct,
            "threads": raw.threads,
            "block": raw.block,
            "sweep_bytes_per_s": raw.sweep_json(),
            "readings_bytes_per_s": raw.readings,
        },
        **shares(rows),
        "rows": rows,
        "windows": [window.to_json() for window in windows],
        "peak_memory_bytes": peak,
    }


def parser() -> argparse.ArgumentParser:
    """The command line of this bench."""
    p = argparse.ArgumentParser(
        prog=f"python -m bench.{NAME}", description="Link utilisation of a streamed model."
    )
    p.add_argument("--model", default="demo", help="the small model that is widened (default demo)")
    p.add_argument("--factor", type=int, default=4)
    p.add_argument("--target", type=Path, help="folder of the model (default: in the user's cache)")
    p.add_argument("--shape", choices=sorted(random_model.SHAPES), help="a random model instead, in --target")
    p.add_argument("--layers", type=int, help="layers of the random model (default: the shape's)")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument(
        "--memory", help="what the engine is promised (default 1.5GB; with cuda what the machine has)"
    )
    p.add_argument("--vram", nargs="+", help="with cuda: what it is promised of the device, one run for each")
    p.add_argument("--tokens", type=int, nargs="+", help="default 1 64 256 1024; with cuda 1 256 1024")
    p.add_argument("--resident", type=int, metavar="N", help="keep N layers, whatever --memory allows")
    p.add_argument("--slots", type=int, default=3, help="of the ring, with --resident (default 3)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=10.0, help="least length of a window (default 10)")
    p.add_argument("--raw-bytes", default="2GB", help="of one reading of the files (default 2GB)")
    p.add_argument("--raw-threads", type=int, help="of a reading (default: the best of several shapes)")
    p.add_argument("--endurance", type=int, default=1000, metavar="PASSES", help="0 leaves it out")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    return p


def bench(args: argparse.Namespace, words: Sequence[str], report: Report) -> dict[str, Any]:
    """Build what is missing, measure, print, and write the result; returns the last line's object."""
    cuda = args.device.startswith("cuda")
    args.tokens = sorted(set(args.tokens or ([1, 256, 1024] if cuda else [1, 64, 256, 1024])))
    args.memory = args.memory or (None if cuda else "1.5GB")
    name = f"{NAME}-cuda" if cuda else NAME
    if cuda and args.resident is not None:
        raise BenchError("--resident is for the processor; limit the device with --vram")
    # Before the model, whose remains would lie under it.
    endurance = endure(args.endurance) if args.endurance else None
    folder = find_model(args)
    if cuda:
        found = measure_cuda(
            args,
            folder,
            lambda vram: load(args, folder, vram),
            lambda passes, read_link, floor: run_rounds(args, passes, read_link, floor, report),
            report,
        )
    else:
        found = measure_cpu(args, folder, report)
    if endurance is not None:
        show_endurance(endurance, report)
    import torch

    record = {
        "bench": name,
        "model": folder.name,
        "dtype": args.dtype,
        "memory_bytes": parse_bytes(args.memory) if args.memory and args.resident is None else None,
        "torch_threads": torch.get_num_threads(),
        **found,
        "endurance": endurance,
    }
    device = torch.cuda.get_device_name() if cuda else "cpu"
    details = {"command": command_line(f"bench.{NAME}", words), "environment": environment(device)}
    write_result(name, {**record, **details}, args.json)
    runs = found["runs"] if cuda else [{"vram": args.memory, "rows": found["rows"]}]
    groups = {f"{folder.name} in {run['vram'] or 'all memory'}": run["rows"] for run in runs}
    report.note(plots.stream_plot(groups, plots.plot_file(name, args.json)))
    return {key: value for key, value in record.items() if key != "windows"}


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON. Exit code 1 where something grew."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    try:
        summary = bench(args, words, report)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    report.last_line(summary)
    return 1 if summary["endurance"] and not summary["endurance"]["passed"] else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
