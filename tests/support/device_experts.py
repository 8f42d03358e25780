"""Mixtures of experts, and what they say where all of them is on a simulated device, or a real one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from offspec_planners.placement import Placement
from tests.support.expert_models import by_need, write_experts
from tests.support.tiny_models import open_model, tiny_engine

CUDA = torch.device("cuda", 0)
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(12)]
GREEDY, SAMPLED = (
    SamplingParams(temperature=temperature, seed=6, max_tokens=5, ignore_eos=True)
    for temperature in (0.0, 0.8)
)
BUDGETS = {"none": 1, "same": 12}  # of drafts
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@dataclass(frozen=True)
class Written:
    """A model, and what it says without speculation and with everything on the device."""

    folder: Path
    layers: int
    experts: int
    says: dict[SamplingParams, tuple[int, ...]]

    def placement(self, near: float, behind: float) -> Placement:
        """With slots for shares of the experts, one at least."""
        slots, host = (max(int(share * self.experts), 1) for share in (near, behind))
        return by_need(self.layers, slots, host)

    def beside(self, share: float) -> Placement:
        """With slots in RAM for a share of the experts, one at least, which the CPU computes."""
        return by_need(self.layers, 0, max(int(share * self.experts), 1))


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 that is float32: TF32 would make near-ties of what is none."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def write(family: str) -> Written:
        folder = write_experts(tmp_path_factory.mktemp(family) / "model", family)
        opened = open_model(folder)
        layers, experts = len(opened.layers), opened.experts.count
        opened.close()
        with tiny_engine(folder, "none", budget=1, resident=range(layers), slots=0, device=CUDA) as engine:
            says = {params: engine.generate(PROMPT, params).token_ids for params in (GREEDY, SAMPLED)}
        return Written(folder, layers, experts, says)

    return write
