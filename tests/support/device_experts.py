"""MoE models, and their answers with all experts on a device, simulated or real."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from offspec_planners.placement import Placement
from tests.support.answers import generate_tokens, sampling
from tests.support.expert_models import on_demand_placement, write_experts
from tests.support.tiny_models import open_model

CUDA = torch.device("cuda", 0)
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(12)]
GREEDY, SAMPLED = sampling(0.0, 5), sampling(0.8, 5)


@dataclass(frozen=True)
class SavedModel:
    """A model, and its answer without speculation with everything on the device."""

    folder: Path
    layers: int
    experts: int
    says: list[tuple[int, ...]]

    def placement(self, near: float, behind: float) -> Placement:
        """Return a placement with slots for shares of the experts, at least one: on the device and in RAM."""
        return on_demand_placement(self.layers, self._slots(near), self._slots(behind))

    def cpu_placement(self, share: float) -> Placement:
        """Return a placement with RAM slots for a share of the experts, at least one, computed by the CPU."""
        return on_demand_placement(self.layers, 0, self._slots(share))

    def _slots(self, share: float) -> int:
        return max(int(share * self.experts), 1)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedModel]:
    @cache
    def write(family: str) -> SavedModel:
        folder = write_experts(tmp_path_factory.mktemp(family) / "model", family)
        opened = open_model(folder)
        layers, experts = len(opened.layers), opened.experts.count
        opened.close()
        given = {"resident": range(layers), "slots": 0, "device": CUDA}
        return SavedModel(
            folder, layers, experts, generate_tokens(folder, GREEDY, SAMPLED, prompt=PROMPT, **given)
        )

    return write
