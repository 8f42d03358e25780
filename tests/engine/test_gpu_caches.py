"""Where keys and values live, and in how many bits: on a CUDA device the tokens are those of the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.tiny_models import tiny_engine, write_model

pytestmark = pytest.mark.gpu
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


CASES = [
    ("llama", "auto", Tier.HOST, False),
    ("llama", "suffix", Tier.HOST, True),
    ("llama", "auto", Tier.DEVICE, True),
    ("deepseek_v3", "suffix", Tier.HOST, True),
    ("deepseek_v3", "suffix", Tier.DEVICE, True),
]


@pytest.mark.parametrize(("family", "draft", "caches", "int8"), some(CASES, *CASES[1:3]))
def test_tokens_are_those_of_the_cpu(
    family: str, draft: str, caches: Tier, int8: bool, tmp_path: Path
) -> None:
    """Two turns, the second over rows that were committed, compacted and cut back."""
    folder, found = write_model(tmp_path / "model", family, num_hidden_layers=4), list[list[object]]()
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    sampled = replace(greedy, temperature=1.0, seed=3)
    placement = Placement((Tier.DISK, Tier.DEVICE, Tier.HOST, Tier.DISK), 2, 2, caches=caches)
    for options in (
        {"draft": "none", "budget": 1},
        {"draft": draft, "budget": 12, "placement": placement, "device": CUDA},
    ):
        with tiny_engine(folder, int8_cache=int8, **options) as engine:
            answer = engine.generate(PROMPT, greedy).token_ids
            again = engine.generate([*PROMPT, *answer[:7], 40, 41], sampled).token_ids
            found.append([answer, again])
    assert found[0] == found[1]
