"""Warm-up on a CUDA device: runs every kernel that an answer needs, since the first launch compiles it.

Shapes, strides and options select the variant of a kernel, so the real operations run: a pass that is stopped
once a layer of each kind has run, draft steps of several widths, and token choices.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress
from offspec.draft.mix.sources import Sources
from offspec.draft.open import Notify
from offspec.model import devices
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.model.tokenizer import TextCodec
from offspec.plan.load_drafts import calibration_ids
from offspec.plan.measure_draft import measure_steps
from offspec.plan.measure_target import StopPass
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec_kernels.backend import choose_backend, disable_triton, first_line
from offspec_kernels.kv_compact import KVTable, kv_compact

_ROWS = 384  # of the pass: enough that some keys are processed one by one and some in blocks
_TOKENS = 512  # of the text that draft trees grow in
_QUIET_S = 1.0  # seconds of warm-up without a progress message
_CHOICES = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=0.7, top_p=0.9),
)


class KernelsUnavailableError(Exception):
    """One of our kernels does not run on this device and is disabled from now on: load again."""


def warm_up_kernels(
    target: LoadedModel, sources: Sources, config: EngineConfig, codec: TextCodec, notify: Notify
) -> None:
    """Run all kernels once and leave the caches empty. On a CPU do nothing: `LoadedModel.warm_up` is enough.

    Args:
        target: The loaded target.
        sources: Drafters for it.
        config: Settings, with the budget that fits.
        codec: Makes the text that draft trees grow in.
        notify: Takes LoadProgress events, if it takes longer than a second.

    Raises:
        KernelsUnavailableError: One of our kernels cannot be compiled or run.
        OffspecError: See `offspec.core.errors`.
    """
    if target.device.type == "cpu":
        return
    steps, began = list(_steps(target, sources, config, codec)), time.perf_counter()
    for done, step in enumerate(steps):
        if time.perf_counter() - began > _QUIET_S:
            notify(LoadProgress("Compiling kernels", done, len(steps), "steps"))
        try:
            step()
        except OffspecError:
            raise
        except Exception as error:
            if devices.is_out_of_memory(error) or choose_backend(target.device) != "triton":
                raise
            for device in target.devices:
                disable_triton(device, f"a kernel could not be compiled ({first_line(error)})")
            if choose_backend(target.device) == "triton":  # it was required by the user
                raise
            raise KernelsUnavailableError from error


def _steps(
    target: LoadedModel, sources: Sources, config: EngineConfig, codec: TextCodec
) -> Iterator[Callable[[], object]]:
    yield partial(_pass, target)
    for params in _CHOICES:
        yield partial(_choice, target, params)
    parts, budget = TargetParts(target), config.budget or 1
    ids = calibration_ids(codec, _TOKENS) if sources.drafters else []
    for drafter in sources.drafters.values():
        for temperature in (0.0, 1.0):
            yield partial(measure_steps, drafter, parts, ids, budget, temperature, seconds=0.0)


@torch.no_grad()
def _pass(target: LoadedModel) -> None:
    model, device = target.tree_model, target.device
    rows = min(_ROWS, model.cache.rows[0].capacity if model.cache.rows else _ROWS)
    last = _last_of_its_kind(target)

    def stop(done: int) -> None:
        if done > last:
            raise StopPass

    model.on_layer = stop
    try:
        with suppress(StopPass):
            hidden = model.hidden(
                torch.zeros(rows, dtype=torch.long, device=device), TreeContext.chain(rows, device)
            )
            if model.streams_head:
                model.logits(hidden[:1])  # otherwise the ring buffer would be out of step
        for stores in [row.stores for row in model.cache.rows[: last + 1]]:
            if stores:
                kv_compact(KVTable(stores), 0, [1])
    finally:
        model.on_layer = None
        target.recover()
        model.cache.rewind(0)
    if not model.streams_head:
        states = torch.zeros(
            model.rows_together(device), target.skeleton.config.hidden_size, dtype=target.dtype, device=device
        )
        model.logits(states)


def _last_of_its_kind(target: LoadedModel) -> int:
    """Return the first layer by which one of each kind has run, by device, attention and weight formats."""
    kinds = getattr(target.skeleton.config, "layer_types", None) or [""] * len(target.layers)
    first = dict[object, int]()
    for index, layer in enumerate(target.skeleton.layers):
        shapes = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
        first.setdefault((target.layers[index].device, kinds[index], shapes), index)
    return max(first.values())


@torch.no_grad()
def _choice(target: LoadedModel, params: SamplingParams) -> None:
    vocabulary, device = target.skeleton.vocab_size, target.device
    processor = LogitsProcessor(params, vocabulary, [], device)
    noise = GumbelNoise(0, vocabulary, device) if processor.uses_noise else None
    logits = torch.zeros(vocabulary, dtype=target.dtype, device=device)
    processor.choose(logits, (), noise, 0)
