"""Device memory at real sizes: requested by loading and answers, reserved, and predicted.
Nothing is computed: the checkpoints are files without contents, and the device runs none of its tasks. Only
the addresses of tensors are counted. One process, which owns the device, runs all cases.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

_SIZES = product(("32b", "70b"), ("none", "1b", "8b"), ("8", "12", "16", "24"))
_CASES = [
    pytest.param("32b:none:8", marks=pytest.mark.slow, id="one"),
    pytest.param(" ".join(map(":".join, _SIZES)), marks=pytest.mark.slow, id="all"),
]


@pytest.mark.skipif(find_spec("tests.support.simulated_cuda") is None, reason="there is no simulated device")
@pytest.mark.parametrize("cases", _CASES)
def test_device_memory_stays_within_the_prediction_at_real_sizes(cases: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.device_memory", str(tmp_path), *cases.split()]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["case"] for line in lines] == cases.split()
    for line in (line for line in lines if "least" not in line):
        assert 0 < line["asked"] <= line["reserved"] <= line["promised"], line
