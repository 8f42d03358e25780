"""Counts of host-device synchronizations and launches, so that no change raises them unnoticed.

Counted on the simulated device, where every wait has a line and nothing depends on time. A capture of a graph
waits, too, but once a size.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from offspec.draft.forward import Expansion
from offspec.draft.lm import LMDrafter
from offspec.engine.batched_pass import BatchedPass
from offspec.engine.sequence_pass import SequencePass
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import on_demand_placement
from tests.support.tiny_models import tiny_engine, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("drafters_stay")]
TOKENS = 40

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "ruled": {
        "temperature": 1.0,
        "seed": 3,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 6,
        "bad_words": ("abc",),
        "logprobs": 2,
    },
}


@dataclass(frozen=True)
class Call:
    """Lines that waited, operations launched outside graphs, and graphs replayed."""

    waits: Counter[str]
    launches: int
    replays: int


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Call]]]:
    """Counts of every draft step, walk, pass and commit of the engines in a test."""
    from tests.support.simulated_cuda import machine as simulated

    if not simulated._installed:
        pytest.skip("counted on the simulated device alone")
    machine, found = simulated.machine(), dict[str, list[Call]]()

    def waits() -> Counter[str]:
        return Counter({f"{cause} in {line}": count for (cause, line), count in machine.waits.items()})

    @contextmanager
    def counting(name: str) -> Iterator[None]:
        before, launches, replays = waits(), machine.counts["launches"], machine.counts["replays"]
        yield
        done = machine.counts["launches"] - launches, machine.counts["replays"] - replays
        found.setdefault(name, []).append(Call(waits() - before, *done))

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with counting(name):
                return function(*args, **kwargs)

        return run

    expanding = LMDrafter.expand_steps

    def stepping(*args: Any) -> Expansion:
        with counting("step"):
            return (yield from expanding(*args))

    monkeypatch.setattr(LMDrafter, "expand_steps", stepping)
    monkeypatch.setattr(SequencePass, "walk_tree", counted("walk", SequencePass.walk_tree))
    monkeypatch.setattr(BatchedPass, "_forward", counted("pass", BatchedPass._forward))
    monkeypatch.setattr(SequencePass, "commit", counted("commit", SequencePass.commit))
    yield found


def _run(
    folder: Path,
    request: str,
    layers: int = 3,
    budget: int = 16,
    family: str = "llama",
    placement: Placement | None = None,
) -> None:
    model = write_model(folder, family, num_hidden_layers=layers)
    placement = placement or Placement((Tier.DEVICE,) * layers, 0, 0, Tier.DEVICE)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **REQUESTS[request])
    device = torch.device("cuda", 0)
    with tiny_engine(model, model, placement=placement, budget=budget, device=device) as engine:
        engine.generate(PROMPT, params)


def _without_captures(calls: list[Call]) -> list[Call]:
    return [call for call in calls if not any("cuda_graph" in line for line in call.waits)]


@pytest.mark.parametrize(
    ("request_", "step", "walk"),
    sampled_params(
        [("greedy", 22, 9), ("sampled", 22, 10), ("filtered", 22, 124)],
        ("greedy", 22, 9),
        ("filtered", 22, 124),
    ),
)
def test_a_draft_step_and_a_walk_wait_once_each(
    request_: str, step: int, walk: int, tmp_path: Path, calls: dict[str, list[Call]]
) -> None:
    """Verification fetches the choices of 16 nodes at once, regardless of the visited number."""
    _run(tmp_path / "model", request_)
    steps = _without_captures(calls["step"])
    assert len(steps) > 20 and all(call.replays == 1 for call in steps)
    for name, found in (("step", steps), ("walk", calls["walk"])):
        assert {sum(call.waits.values()) for call in found} == {1}, (name, found)
    assert max(call.launches for call in steps) == step
    assert max(call.launches for call in calls["walk"]) == walk
    assert {sum(call.waits.values()) for call in calls["commit"]} == {0}


def test_rules_wait_for_nothing_more(tmp_path: Path, calls: dict[str, list[Call]]) -> None:
    """Log-probabilities are copied in a separate transfer, once per verification."""
    _run(tmp_path / "model", "ruled")
    assert {sum(call.waits.values()) for call in _without_captures(calls["step"])} == {1}
    assert {sum(call.waits.values()) for call in calls["walk"]} == {2}


def test_a_large_tree_is_walked_by_groups_of_likely_nodes(
    tmp_path: Path, calls: dict[str, list[Call]]
) -> None:
    _run(tmp_path / "model", "greedy", budget=48)
    waits = [sum(call.waits.values()) for call in calls["walk"]]
    assert sum(waits) * 5 < TOKENS, "a draft equal to the target gets all tokens right, 16 nodes per group"


def test_layers_of_a_pass_launch_so_much_each(tmp_path: Path, calls: dict[str, list[Call]]) -> None:
    launches = []
    for layers in (2, 4):
        calls.clear()
        _run(tmp_path / str(layers), "greedy", layers)
        last = calls["pass"][-1]
        launches.append(last.launches)
        assert sum(last.waits.values()) == 1, "for the ids of the embedding, whose rows are on disk"
    assert launches[1] - launches[0] == 2 * 40


@pytest.mark.parametrize("family", sampled_params(["mixtral", "gpt_oss"], "mixtral"))
def test_experts_on_the_device_wait_for_nothing(
    family: str, tmp_path: Path, calls: dict[str, list[Call]]
) -> None:
    """Rows are assigned to experts on the device, so the host does not wait."""
    _run(tmp_path / "model", "greedy", family=family)
    for found in calls["pass"][1:]:
        assert sum(found.waits.values()) == 1, ("for the ids of the embedding", found.waits)


def test_experts_that_are_fetched_wait_once_a_layer(tmp_path: Path, calls: dict[str, list[Call]]) -> None:
    """The host must know which experts to fetch. All stay cached, so later passes do not wait for copies."""
    layers = 3
    _run(
        tmp_path / "model",
        "greedy",
        layers,
        family="mixtral",
        placement=on_demand_placement(layers, 100, 100),
    )
    assert sum(calls["pass"][-1].waits.values()) == layers + 1
