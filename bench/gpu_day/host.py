"""Host time: microseconds per layer in a pass of tiny layers, and steps of a draft with 1B's shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.gpu_day.profiling import device_kernels
from bench.gpu_day.step_context import StepContext
from bench.stream.floor import synchronize

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel

_PREFIX = 100


def measure(context: StepContext) -> None:
    import torch

    from bench.gpu_day.models import DRAFT, write_nf4
    from bench.lib import random_model
    from offspec.core.config import EngineConfig
    from offspec.plan.load import open_and_load

    shape = replace(random_model.SHAPES["tiny"], layers=8 if context.dry else 80)
    folders = {
        "bfloat16": random_model.build(shape, context.models / "tiny-bfloat16"),
        "nf4": write_nf4(shape, context.models / "tiny-nf4"),
    }
    found = context.found
    found["launches"] = _launches(context)
    for name, folder in folders.items():
        config = EngineConfig(str(folder), draft="none", device=str(context.device.type), context=600)
        target = open_and_load(config, lambda event: None).target
        try:
            found[name] = {"profile": device_kernels(partial(_pass, target, 64, 1))}
            found[name] |= {
                rows: _pass(target, rows, 2 if context.dry else 12)
                for rows in ((1, 8) if context.dry else (1, 64, 256))
            }
        finally:
            target.close()
        context.save()
    if not context.dry:
        from bench.kernels.graphs import measure_graphs

        draft = random_model.build(DRAFT, context.models / "draft-1b")
        found["draft_steps"] = measure_graphs(str(draft), torch.device("cuda"), (1, 8, 16, 32, 64), rounds=6)
    found["short"] = "µs of host time per layer: " + ", ".join(
        f"{name} {found[name][1]['host_us_per_layer']:.0f}" for name in folders
    )


def _launches(context: StepContext) -> dict[str, float]:
    """Return the host's microseconds to launch an addition, a library product, and a Triton kernel."""
    import torch
    import torch.nn.functional as F

    from offspec_kernels.row_linear import row_linear

    rows, weight = torch.ones(16, 64, device=context.device), torch.ones(64, 64, device=context.device)
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: rows.add_(1.0),
        "library product": lambda: F.linear(rows, weight),
        "row_linear": lambda: row_linear(rows, weight, path="triton"),
    }
    found = {}
    for name, call in calls.items():
        times = 2 if context.dry else 300
        call()
        synchronize(context.device)
        began = time.perf_counter()
        for _ in range(times):
            call()
        found[name] = 1e6 * (time.perf_counter() - began) / times
        synchronize(context.device)
    return found


def _pass(target: LoadedModel, rows: int, times: int) -> dict[str, Any]:
    """Return the minimum over several passes of the time to launch all layers and of the time to finish."""
    import torch

    from offspec.model.attention import TreeContext

    model, device, each = target.tree_model, target.device, []
    for _ in range(times):
        for cache in model.cache.rows:
            cache.truncate(_PREFIX)
        model.cache.length = _PREFIX
        tokens = torch.arange(rows, device=device) % 100
        position = torch.arange(_PREFIX, _PREFIX + rows, device=device)
        context = TreeContext(_PREFIX, position, 0, torch.eye(rows, dtype=torch.bool))
        synchronize(device)
        began = time.perf_counter()
        with torch.inference_mode():
            model.hidden(tokens, context)
        asked = time.perf_counter() - began
        synchronize(device)
        each.append((asked, time.perf_counter() - began))
    model.cache.rewind(0)
    layers = len(target.layers)
    return {
        "host_us_per_layer": 1e6 * min(asked for asked, _ in each) / layers,
        "us_per_layer": 1e6 * min(whole for _, whole in each) / layers,
    }
