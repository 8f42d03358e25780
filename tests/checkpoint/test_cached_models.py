"""`offspec models` and `offspec plan` agree on the minimum memory of a model."""

import json
from pathlib import Path

import pytest

from docs import make_models
from offspec.checkpoint.cached_models import CachedModel

RECORD = json.loads(make_models.RECORD.read_text("utf-8"))
LAYERS = dict(zip(make_models.MODELS, (36, 40, 64, 80, 126), strict=True))


@pytest.mark.parametrize("model", make_models.MODELS)
def test_minimum_memory_equals_that_of_plans(model: str) -> None:
    planned = RECORD["models"][model]
    size = planned["disk_bytes"]
    cached = CachedModel(model, "hub", Path(), size, size, LAYERS[model])
    assert cached.min_ram == pytest.approx(planned["least_memory_bytes"], rel=0.1)
    assert cached.min_vram == pytest.approx(planned["least_vram_bytes"], rel=0.1)
