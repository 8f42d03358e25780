"""What the process loads and holds once a model is open and no weight was read."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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

open_models(EngineConfig(model=sys.argv[1], draft="substitute,suffix", memory=2 * 10**9, device="cpu"), print)
memory.trim()
print(json.dumps({"modules": list(sys.modules), "bytes": memory.resident_bytes()}))
"""


def _opened(model: str) -> Any:
    """The modules and the resident bytes of a process that opened a model and a draft."""
    command = [sys.executable, "-c", OPENING, model]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return json.loads(subprocess.check_output(command, text=True, env=paths).splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_model_is_opened_without_what_it_does_not_need(kind: str, tmp_path: Path) -> None:
    if kind == "gguf" and importlib.util.find_spec(DEMO_PACKAGE) is None:
        pytest.skip(f"{DEMO_PACKAGE} is not installed")
    found = _opened(DEMO if kind == "gguf" else str(write_model(tmp_path / "model")))
    assert not {*UNUSED, *(("gguf",) if kind == "safetensors" else ())} & set(found["modules"])
    if torch.version.cuda is None:  # whose libraries are larger
        assert found["bytes"] < 500_000_000
