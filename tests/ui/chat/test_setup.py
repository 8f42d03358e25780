"""Opening the engine of a chat, in a process of its own that ends afterwards."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_model

# Triton is imported by whatever compiles kernels, and says at the end of the process what is not freed.
CHILD = """
import sys
import triton.language
from offspec.core.config import EngineConfig
from offspec.core.errors import OffspecError
from offspec.ui.chat.setup import open_engine
config = EngineConfig(sys.argv[1], draft="none", budget=1, memory=int(sys.argv[2]), learn=False)
try:
    open_engine(config, None, lambda event: None).close()
except OffspecError as error:
    sys.exit(3)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "memory, code",
    [(1_000_000, 3), pytest.param(4_000_000_000, 0, marks=pytest.mark.exhaustive)],
    ids=["fails", "loads"],
)
def test_a_process_ends_without_a_report_of_leaks(memory: int, code: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(memory)], capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stderr) == (code, "")
