"""Which way of cutting tree_attention's work is the fastest on a CUDA device: a grid of them is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from bench.kernels.attention import LIMITS, Inputs
from bench.kernels.cases import Setting, Spec, rms_ratio
from bench.kernels.clock import Call, clock_of, time_in_turns

if TYPE_CHECKING:
    from offspec_kernels.tree_attention.triton import Blocks

# Shared memory bounds them from above: what does not fit on a device is left out there.
ROWS, KEYS = (32, 64, 128), (32, 64, 128)
WARPS, STAGES = (4, 8), (2, 3, 4)
SPLITS = (1, 2, 4, 8, 16)


def candidates(chosen: Blocks) -> Iterator[Blocks]:
    """Every cut of the grid, the launcher's own among them."""
    splits = sorted({*SPLITS, chosen.splits})
    seen = {chosen}
    yield chosen
    for rows, keys, warps, stages, parts in product(ROWS, KEYS, WARPS, STAGES, splits):
        cut = replace(chosen, rows=rows, keys=keys, warps=warps, stages=stages, splits=parts)
        if cut not in seen:
            seen.add(cut)
            yield cut


def tune(spec: Spec, setting: Setting, seconds: float = 0.02) -> list[dict[str, Any]]:
    """Seconds of each cut that runs and is right, the fastest first; `chosen` marks the launcher's own."""
    from offspec_kernels.tree_attention.triton import attend, choose_blocks

    given = Inputs(spec, setting)
    query, key, value = given.query, given.key, given.value
    chosen = choose_blocks(query, key, value)
    clock, truth, tried = clock_of(setting.device), torch.empty_like(query), list[dict[str, Any]]()
    attend(query, key, value, given.tree_mask, given.size**-0.5, None, None, None, truth, chosen)
    out = torch.empty_like(query)
    for cut in candidates(chosen):

        def run(cut: Blocks = cut) -> None:
            attend(query, key, value, given.tree_mask, given.size**-0.5, None, None, None, out, cut)

        out.fill_(torch.nan)
        if not _runs(run) or not rms_ratio(out, truth) <= 2 * LIMITS[spec.dtype]:
            continue
        spent = time_in_turns({"cut": run}, clock, seconds)["cut"].seconds
        tried.append({"blocks": asdict(cut), "seconds": spent, "chosen": cut == chosen})
    return sorted(tried, key=lambda entry: float(entry["seconds"]))


def _runs(call: Call) -> bool:
    """Whether a cut fits on the device."""
    from triton.runtime.errors import OutOfResources

    try:
        call()
    except (OutOfResources, RuntimeError):
        return False
    return True
