"""A target that streams without a draft: loading it, and describing its placement and files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from offspec.core.config import EngineConfig
from offspec.core.values import parse_bytes

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel
    from offspec_planners.placement import Placement


def load(args: argparse.Namespace, folder: Path) -> tuple[LoadedModel, Placement]:
    """Load the target on the processor, placed by the engine within its memory limit, or by --resident."""
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel
    from offspec.plan.load import open_and_load
    from offspec_planners.placement import Placement, spread_evenly

    context = max(*args.tokens, 2)
    if args.resident is None:
        memory = parse_bytes(args.memory) if args.memory else None
        given = {"memory": memory, "device": "cpu", "dtype": args.dtype, "context": context}
        assembly = open_and_load(EngineConfig(str(folder), draft="none", **given), lambda event: None)
        return assembly.target, assembly.placement
    checkpoint = open_checkpoint(str(folder))
    dtype = getattr(torch, args.dtype)
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, torch.device("cpu"))
    count = len(target.layers)
    placement = Placement.in_memory(count, spread_evenly(count, args.resident), args.slots)
    target.load(placement, context, lambda done, total: None)
    return target, placement


def streamed_files(target: LoadedModel, placement: Placement) -> list[Path]:
    """Return the files of the streamed layers, in the order of the layers."""
    kept = set(placement.resident)
    streamed = [layer for index, layer in enumerate(target.layers) if index not in kept]
    if not streamed:
        raise BenchError("every layer stays in memory, so nothing streams: decrease --memory")
    return list(dict.fromkeys(extent.file for layer in streamed for extent in layer.layout.extents))


def describe(target: Any, placement: Any) -> dict[str, Any]:
    """Return the placement of the layers for the record."""
    tiers = [str(tier) for tier in placement.tiers]
    return {
        **{f"{tier}_layers": tiers.count(tier) for tier in ("device", "host", "disk")},
        "slots": placement.slots,
        "staging": placement.staging,
        "head": str(placement.head),
        "layer_bytes": max(target.layer_bytes),
    }
