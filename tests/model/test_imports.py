"""Imports and memory of the process after a model is opened and before weights are read."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offspec.checkpoint.open import DEMO, DEMO_PACKAGE
from tests.support.tiny_models import write_model

UNUSED = [
    *("accelerate", "bitsandbytes", "sympy", "textual", "torch._dynamo", "torch._inductor"),
    *("torch.distributed.tensor", "triton", "typer"),
]
OPENING = """
import json, sys
import offspec.engine.engine
from offspec.core import memory
from offspec.core.config import EngineConfig
from offspec.plan.load import open_models

for model in sys.argv[1:]:
    open_models(EngineConfig(model, draft="self,suffix", memory=2 * 10**9, device="cpu"), print).close()
    memory.malloc_trim()
    print(json.dumps({"modules": list(sys.modules), "bytes": memory.resident_bytes()}))
"""


@pytest.mark.exhaustive
def test_opening_a_model_imports_nothing_unneeded(tmp_path: Path) -> None:
    """A safetensors model, then one from a GGUF file, which needs more."""
    models = [str(write_model(tmp_path / "model"))]
    if importlib.util.find_spec(DEMO_PACKAGE) is not None:
        models.append(DEMO)
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.check_output([sys.executable, "-c", OPENING, *models], text=True, env=paths)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == len(models) and "gguf" not in found[0]["modules"]
    for after in found:
        assert not set(UNUSED) & set(after["modules"])
        if torch.version.cuda is None:  # whose libraries are larger
            assert after["bytes"] < 500_000_000
