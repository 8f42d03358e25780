"""Speed-up of a draft step on a CUDA device from replaying it as one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from bench.lib.cgroup import BenchError
from bench.lib.report import ratio
from offspec.checkpoint import open_checkpoint
from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Scorer
from offspec.model.attention import TreeContext
from offspec.model.fused.model import FusedModel
from offspec.model.fused.shape import decoder_shape
from offspec.model.fused.weights import fuse_layers
from offspec.model.loaded import LoadedModel
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_planners.acceptance import Calibration
from offspec_planners.placement import Placement

WIDTHS = (1, 4, 8, 16, 32)
_PREFIX = 200  # tokens of context
_TURNS = 5
_CLOSE = 0.25  # log-probabilities: two units in the last place of a large bfloat16 logit


class Steps:
    """One way to compute a draft step after a prefix: forward pass, head, noise, and ranking of children."""

    def __init__(self, model: FusedModel, device: torch.device) -> None:
        self._model, self._device, vocabulary = model, device, model.skeleton.vocab_size
        processor = LogitsProcessor(SamplingParams(temperature=1.0, seed=0), vocabulary, [])
        self._scorer = Scorer(processor, GumbelNoise(0, vocabulary, str(device)), Calibration())
        with torch.inference_mode():
            model.cache.rewind(0)
            model.hidden(self._tokens(0, _PREFIX), TreeContext.chain(_PREFIX, device))
            model.cache.commit(_PREFIX, [])

    def _tokens(self, start: int, count: int) -> torch.Tensor:
        found = torch.arange(start, start + count, device=self._device)
        return found.remainder(self._model.skeleton.vocab_size)

    def run(self, width: int) -> tuple[float, Children]:
        """Return the seconds of a step of `width` siblings, and their likeliest children."""
        model, position = self._model, torch.full((width,), _PREFIX, device=self._device)
        nodes = self._tokens(7, width)
        start = time.perf_counter()
        with torch.inference_mode():
            alone = torch.eye(width, dtype=torch.bool, device=self._device)
            logits = model.logits(model.hidden(nodes, TreeContext(_PREFIX, position, 0, alone)))
            children = self._scorer.children(logits, [], [_PREFIX + 1] * width)
        spent = time.perf_counter() - start
        model.cache.rewind(_PREFIX)
        return spent, children


def measure_graphs(
    model: str, device: torch.device, widths: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Return one row per width: the median draft step with and without graphs, alternating, and the speed-up.

    Raises BenchError if the draft does not support graphs, or the results differ.
    """
    checkpoint = open_checkpoint(model, unpack=True)
    draft = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, device)
    capacity, count = _PREFIX + max(widths), len(draft.layers)
    draft.load(Placement.in_memory(count, range(count), 0), capacity, lambda *_: None)
    try:
        shape = decoder_shape(draft.skeleton)
        if shape is None:
            raise BenchError("this draft does not support CUDA graphs; name another with --draft")
        layers = fuse_layers(draft.skeleton, shape, lambda index: draft.layers[index].unbind())
        graphs, plain = (
            Steps(FusedModel(draft.skeleton, shape, layers, capacity, device, static=static), device)
            for static in (True, False)
        )
        for width in widths:
            with_graph, without = (steps.run(width)[1].log_prob[:, 0] for steps in (graphs, plain))
            if not abs(with_graph - without).mean() <= _CLOSE:
                raise BenchError(f"graph and plain step of {width} nodes score children differently")
        return [_row(graphs, plain, width, rounds) for width in widths]
    finally:
        draft.close()


def _row(graphs: Steps, plain: Steps, width: int, rounds: int) -> dict[str, Any]:
    """Time several consecutive steps of each way, as in tree growth; the first step is not counted."""
    times = dict[Steps, list[float]]({graphs: [], plain: []})
    for _ in range(_TURNS):
        for steps, spent in times.items():
            steps.run(width)
            spent += [steps.run(width)[0] for _ in range(rounds)]
    seconds = {"graphs_seconds": median(times[graphs]), "plain_seconds": median(times[plain])}
    return {"width": width, **seconds, "gain": ratio(seconds["plain_seconds"], seconds["graphs_seconds"])}
