"""Running packs: damage is noticed at the first read, before any computation with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec.core.config import EngineConfig
from offspec.core.errors import CheckpointError
from offspec.core.events import ignore_event
from offspec.model.attention import TreeContext
from offspec.plan.fit import find_fit, fit_needs, fits_unpacked, min_memory
from offspec.plan.load import open_models
from offspec.plan.needs import memory_parts
from offspec_planners.placement import Placement, Tier
from tests.model.quantize.stage import LAYERS, Bench, flip
from tests.support.tiny_models import nothing, open_model

IDS = torch.tensor([5, 9, 2, 40])
EVERYTHING = Placement.in_memory(LAYERS, range(LAYERS), 0)
STREAMED = Placement.in_memory(LAYERS, [0], 2)
HOSTED = Placement((Tier.DEVICE, Tier.HOST, Tier.DISK), 2, 2)


def _run(folder: Path, placement: Placement, *, unpacked: bool = False) -> torch.Tensor:
    model = open_model(folder)
    try:
        model.load(placement, 16, nothing, unpacked=unpacked)
        with torch.no_grad():
            hidden = model.tree_model.hidden(IDS, TreeContext.chain(len(IDS), model.device))
            return model.tree_model.logits(hidden)
    finally:
        model.close()


@pytest.mark.parametrize(
    ("place", "file", "byte"),
    [
        (EVERYTHING, "layer-0001", -1),
        (STREAMED, "layer-0000", -1),
        (STREAMED, "layer-0002", -1),
        (HOSTED, "layer-0001", -1),
        (HOSTED, "layer-0002", -1),
        ("unpacked", "layer-0001", 5000),
        (STREAMED, "rest", -1),  # the embedding is read by row: verified whole before the first
    ],
)
def test_a_flipped_byte(bench: Bench, place: Placement | str, file: str, byte: int) -> None:
    bench.pack("int4-g64" if byte == -1 else "nf4")
    placement = place if isinstance(place, Placement) else EVERYTHING
    _run(bench.out, placement)
    flip(bench.out / f"model-{file}.safetensors", byte)
    with pytest.raises(CheckpointError, match=rf"model-{file}.* is damaged.*offspec pack .*again"):
        _run(bench.out, placement, unpacked=place == "unpacked")


def test_unpacked_once_if_all_values_fit(bench: Bench) -> None:
    """If all values fit in memory, they are unpacked at load, otherwise whenever a layer runs."""
    bench.pack("nf4")
    config = EngineConfig(str(bench.out), draft="none", dtype="float32", budget=1, context=16)
    opened = open_models(config, ignore_event)
    try:
        fit = find_fit(opened, config)
        assert fits_unpacked(opened, config, fit)
        tight = replace(opened, memory=min_memory(opened, config)[0])
        assert not fits_unpacked(tight, config, find_fit(tight, config))
        taken = [
            {
                part.what: part.bytes
                for part in memory_parts(
                    each,
                    fit_needs(each, config, fit),
                    fit.placement,
                    unpacked=fits_unpacked(each, config, fit),
                )
            }
            for each in (opened, tight)
        ]
        assert taken[0]["layers"] == sum(opened.target.unpacked_layer_bytes) > taken[1]["layers"]
    finally:
        opened.close()
    assert torch.equal(_run(bench.out, EVERYTHING, unpacked=True), _run(bench.out, EVERYTHING))
