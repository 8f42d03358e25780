"""The bench of roundings on a tiny model: each way is attention, and the plain one is the coarsest."""

import json
from pathlib import Path

import pytest
import torch

from bench.kernels import attention_error
from tests.support.tiny_models import write_model


@pytest.mark.exhaustive
def test_every_way_is_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 60, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, 60, 16, generator=generator)
    for name, attend in attention_error.WAYS.items():
        assert attention_error.layer_error((query, key, value, 0.25), attend) < 1e-5, name


@pytest.mark.exhaustive
def test_a_record_of_a_tiny_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    found = attention_error.measure(folder, ids)
    assert found["ways"]["fused"]["changed"] == 0
    assert 0 < found["ways"]["kernel"]["error"] < 0.01
    assert found["ways"]["kernel"]["error"] < 2 * found["ways"]["fused"]["error"]
    json.dumps(found)
