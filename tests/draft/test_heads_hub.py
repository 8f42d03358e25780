"""Heads by Hub id: a repository with a head is downloaded; for a model only the configuration is."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.checkpoint.hub_visitor import Visitor
from tests.support.fake_hub import FakeHub, serve
from tests.support.heads_files import MEDUSA_CONFIG, medusa_tensors

VISIT = """
from offspec.draft.heads.open import open_head
from tests.support.heads_files import target_shape


def visit(name, events, said):
    head = open_head(name, target_shape(), events.append)
    said["text"] = "none" if head is None else head.name
"""


@pytest.mark.exhaustive
def test_head_and_model_repositories(tmp_path: Path) -> None:
    pickled = io.BytesIO()
    torch.save(medusa_tensors(), pickled)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
    heads = {"config.json": json.dumps(MEDUSA_CONFIG).encode(), "medusa_lm_head.pt": pickled.getvalue()}
    model = {"config.json": json.dumps(config).encode(), "model.safetensors": save({"a": torch.zeros(9)})}
    hub = FakeHub()
    hub.repositories = {"org/heads": heads, "org/model": model, "org/bare": {"medusa_lm_head.pt": b""}}
    with serve(hub):
        found = Visitor(hub, tmp_path, VISIT).all("org/heads", "org/model", "org/bare")
    assert [said.text for said in found] == ["medusa (3 heads)", "none", "none"]
    assert sorted(hub.downloads()) == ["config.json", "config.json", "medusa_lm_head.pt"]
