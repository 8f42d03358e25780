"""What a draft's step gains on a CUDA device when it is replayed as one graph."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from bench.draft import Steps, in_turns, new_scorer, open_draft
from bench.lib.cgroup import BenchError
from bench.lib.report import ratio
from offspec.model.fused.forward import LeanModel
from offspec.model.fused.shape import plain_shape
from offspec.model.fused.weights import fuse_layers
from offspec.model.loaded import LoadedModel

WIDTHS = (1, 4, 8, 16, 32)
_PREFIX, _TEMPERATURE = 200, 1.0
_BITS, _DTYPE = 16, "bfloat16"
_TURNS = 5
_CLOSE = 0.25  # log-probabilities: two units of a large logit's last place in bfloat16


def lean_pair(draft: LoadedModel, capacity: int) -> dict[str, LeanModel]:
    """Two lean models of the same weights, the one in graphs, the other operation by operation.

    They take the layers over. Raises BenchError where the draft's shape is not plain.
    """
    shape = plain_shape(draft.skeleton)
    if shape is None:
        raise BenchError("the draft is not of a plain shape: it has no graphs; name another with --draft")
    layers = fuse_layers(draft.skeleton, shape, lambda index: draft.layers[index].unbind())
    return {
        name: LeanModel(draft.skeleton, shape, layers, capacity, draft.device, static=static)
        for name, static in (("graphs", True), ("plain", False))
    }


def compare(ways: dict[str, Steps], widths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One row a width: the median step of each way, in turns, and the gain of graphs."""
    rows = []
    for width in widths:
        times = in_turns(ways, width, rounds, _TURNS)
        spent = {name: median(all_of) for name, all_of in times.items()}
        rows.append(
            {
                "width": width,
                **{f"{name}_seconds": seconds for name, seconds in spent.items()},
                "gain": ratio(spent["plain"], spent["graphs"]),
            }
        )
    return rows


def measure_graphs(
    model: str, device: torch.device, widths: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Steps of a draft with all of its layers on the device. Raises BenchError where the ways differ."""
    draft = open_draft(model, _BITS, _DTYPE, _PREFIX + max(widths), str(device))
    try:
        pair = lean_pair(draft, _PREFIX + max(widths))
        vocabulary = draft.skeleton.vocab_size
        ways = {
            name: Steps(lean, new_scorer(vocabulary, _TEMPERATURE, str(device)), _PREFIX, str(device))
            for name, lean in pair.items()
        }
        for width in widths:
            with_graph, without = (steps.run(width)[1].log_prob[:, 0] for steps in ways.values())
            if not abs(with_graph - without).mean() <= _CLOSE:
                raise BenchError(f"a graph of {width} nodes scores their children unlike the plain step")
        return compare(ways, widths, rounds)
    finally:
        draft.close()
