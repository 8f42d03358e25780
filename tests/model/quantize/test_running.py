"""A pack that runs: what is damaged in it is noticed when it is first read, and never computed with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec.core.config import EngineConfig
from offspec.core.errors import CheckpointError
from offspec.core.events import unheard
from offspec.model.attention import TreeContext
from offspec.plan.load import open_models
from offspec_planners.placement import Placement, Tier
from tests.model.quantize.stage import LAYERS, Bench
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


def _flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("placement", [EVERYTHING, STREAMED, HOSTED])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_flipped_byte_in_a_layer(bench: Bench, placement: Placement, layer: int) -> None:
    bench.pack("int4-g64")
    _run(bench.out, placement)
    files = sorted(bench.out.glob("model-layer-*.safetensors"))
    _flip(files[layer], -1)
    with pytest.raises(CheckpointError, match=rf"{files[layer].name} is damaged.*offspec pack .*again"):
        _run(bench.out, placement)


def test_a_flipped_byte_where_layers_are_unpacked_as_they_load(bench: Bench) -> None:
    bench.pack("nf4")
    _flip(sorted(bench.out.glob("model-layer-*.safetensors"))[1], 5000)
    with pytest.raises(CheckpointError, match=r"damaged.*offspec pack .*again"):
        _run(bench.out, EVERYTHING, unpacked=True)


def test_a_flipped_byte_in_the_rest(bench: Bench) -> None:
    """The embedding is read row by row, so its file is compared whole before the first."""
    bench.pack("nf4")
    _flip(bench.out / "model-rest.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"model-rest.safetensors is damaged.*offspec pack .*again"):
        _run(bench.out, STREAMED)


def test_unpacked_once_where_there_is_room(bench: Bench) -> None:
    """Where all values fit in memory they are made while loading, else whenever a layer runs."""
    bench.pack("nf4")
    config = EngineConfig(str(bench.out), draft="none", dtype="float32", budget=1, context=16)
    opened = open_models(config, unheard)
    try:
        fit = opened.fit(config)
        assert opened.unpacks(config, fit)
        tight = replace(opened, memory=opened.least(config)[0])
        assert not tight.unpacks(config, tight.fit(config))
        taken = [{part.what: part.bytes for part in each.parts(config, fit)} for each in (opened, tight)]
        assert taken[0]["layers"] == sum(opened.target.held_bytes) > taken[1]["layers"]
    finally:
        opened.close()
    assert torch.equal(_run(bench.out, EVERYTHING, unpacked=True), _run(bench.out, EVERYTHING))
