"""Models of random weights in a given shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib import random_model
from bench.lib.cgroup import BenchError
from bench.lib.random_model import SHAPES
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import on_disk


def test_a_random_model_is_what_its_shape_says(tiny_random: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = SHAPES["tiny"]
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_random)
    assert len(model.model.layers) == shape.layers
    planned = sum(
        random_model.tensor_bytes(entry) for entries in random_model.plan(shape).values() for entry in entries
    )
    assert sum(parameter.nbytes for parameter in model.parameters()) == planned
    assert bool((model.model.layers[2].input_layernorm.weight == 1).all())
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 7, 30]])).logits
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0
    checkpoint = open_checkpoint(str(tiny_random))
    (stored,) = on_disk(checkpoint.tensors["model.layers.3.input_layernorm.weight"])
    assert stored.offset % 4096 == 0


def test_a_model_that_is_there_is_used_again_and_another_is_refused(tiny_random: Path) -> None:
    file = tiny_random / random_model.layer_file(0)
    written = file.stat().st_mtime_ns
    assert random_model.build(SHAPES["tiny"], tiny_random) == tiny_random
    assert file.stat().st_mtime_ns == written
    with pytest.raises(BenchError, match="another model"):
        random_model.build(replace(SHAPES["tiny"], layers=2), tiny_random)


def test_a_layer_of_the_70b_shape_has_its_bytes() -> None:
    shape = SHAPES["70b"]
    files = random_model.plan(shape)
    layer = sum(map(random_model.tensor_bytes, files[random_model.layer_file(0)]))
    assert 1.70e9 < layer < 1.72e9
    parameters = sum(random_model.tensor_bytes(entry) for entries in files.values() for entry in entries) / 2
    assert 70.5e9 < parameters < 70.6e9
