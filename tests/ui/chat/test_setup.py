"""Opening a chat's engine in a process of its own, which ends afterwards."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_model

# Triton is imported by any code that compiles kernels, and reports leaks when the process ends.
CHILD = """
import sys
import triton.language
from offspec.core.config import EngineConfig
from offspec.core.errors import OffspecError
from offspec.ui.chat.setup import open_engine
for memory in (1_000_000, 4_000_000_000):
    config = EngineConfig(sys.argv[1], draft="none", budget=1, memory=memory, learn=False)
    try:
        open_engine(config, None, lambda event: None).close()
        print("loaded")
    except OffspecError as error:
        print("failed")
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_process_ends_without_a_leak_report(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(write_model(tmp_path / "model"))], capture_output=True, text=True
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "failed\nloaded\n", "")
