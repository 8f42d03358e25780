"""A thousand passes of a small streamed model: what grows, has a leak."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from bench.lib.random_model import SHAPES, build
from bench.stream.window import Passes

ALLOWED_GROWTH = 4 << 20  # bytes of resident memory over all passes: 4 kB a pass would be four times that
_WARM_UP = 50
_LENGTHS = (1, 5, 24, 64)  # tokens of a pass, in turns


def held() -> dict[str, int]:
    """What this process holds now: resident bytes, threads, descriptors."""
    from offspec.core import memory

    memory.trim()
    return {
        "resident_bytes": memory.resident_bytes(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def endure(passes: int, *, warm_up: int = _WARM_UP) -> dict[str, Any]:
    """Stream a tiny random model `passes` times, every layer from disk; what was held before and after."""
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel
    from offspec_planners.placement import Placement

    with tempfile.TemporaryDirectory(prefix="offspec-bench-") as place:
        checkpoint = open_checkpoint(str(build(SHAPES["tiny"], Path(place) / "tiny")))
        target = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
        try:
            target.load(Placement.in_memory(len(target.layers), (), 3), max(_LENGTHS), lambda done, of: None)
            runner = Passes(target)
            for index in range(warm_up):
                runner.run(_LENGTHS[index % len(_LENGTHS)])
            before = held()
            for index in range(passes):
                runner.run(_LENGTHS[index % len(_LENGTHS)])
            return judge(passes, before, held())
        finally:
            target.close()


def judge(passes: int, before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """Growth of each figure, and whether all of it is within what is allowed."""
    growth = {name: after[name] - before[name] for name in before}
    passed = (
        growth["resident_bytes"] <= ALLOWED_GROWTH and growth["threads"] <= 0 and growth["descriptors"] <= 0
    )
    return {
        "passes": passes,
        "passed": passed,
        "allowed_growth_bytes": ALLOWED_GROWTH,
        "before": before,
        "after": after,
        "growth": growth,
    }
