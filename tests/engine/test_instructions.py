"""oneDNN held to fewer instructions than the processor has, as images of some machines set it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_model

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256}

PROGRAM = """
import sys
from offspec import SamplingParams, load

sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
prompt = [3 + (7 * i * i + i) % 290 for i in range(130)]
answers = set()
for draft, budget in (("none", 1), ("self", 64)):
    with load(sys.argv[1], draft=draft, budget=budget, dtype="bfloat16", memory="1GB", context=256) as engine:
        answers.add(engine.generate(prompt, sampling).token_ids)
assert len(answers) == 1, answers
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_bfloat16_with_fewer_instructions(instructions: str, tmp_path: Path) -> None:
    """The product in bfloat16 that compiled loops call throws there, and no exception passes such a loop."""
    model = write_model(tmp_path / "model", **SIZES)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        cwd=ROOT,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": instructions},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
