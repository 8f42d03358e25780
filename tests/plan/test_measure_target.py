"""Benchmark of a loaded model: it leaves no changes, whatever was measured and wherever it stopped."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from offspec.draft.lm import LMDrafter
from offspec.engine.engine import Engine
from offspec.model.fused.model import FusedModel
from offspec.model.parts import TargetParts
from offspec.plan import measure_draft as draft_trial
from offspec.plan import measure_target as trial
from offspec.plan.measure_draft import measure_steps
from offspec.plan.measure_target import PassBenchmark, make_monotonic, measured_hardware
from offspec.plan.model_sizes import sizes_of
from offspec.stream.workers import RingStats
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.placement import Placement, Tier
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import CALIBRATION, nothing, open_model, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
LAYERS, CAPACITY = 5, 256 + 64
PLACEMENTS = {
    "resident": Placement.in_memory(LAYERS, range(LAYERS), 0),
    "one slot": Placement.in_memory(LAYERS, (2,), 1),
    "streamed with its head": Placement.in_memory(LAYERS, (1, 3), 3, Tier.DISK),
    "head alone": Placement.in_memory(LAYERS, range(LAYERS), 2, Tier.DISK),
    "copied and read": Placement((Tier.DISK, Tier.HOST, Tier.DEVICE, Tier.DISK, Tier.HOST), 2, 2, Tier.HOST),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[int, ...]:
    with tiny_engine(model, "none", budget=1) as engine:
        return engine.generate(PROMPT, PARAMS).token_ids


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the benchmark: a tiny model needs far less time."""
    monkeypatch.setattr(trial, "_LINK_SECONDS", 0.06)
    monkeypatch.setattr(draft_trial, "_DRAFT_SECONDS", 0.05)


def _try(engine: Engine, seconds: float) -> MeasuredCosts:
    return PassBenchmark(engine._assembly.target, CALIBRATION, CAPACITY).measure(nothing, seconds)


def _state(engine: Engine) -> tuple[object, ...]:
    """Return the state that a benchmark must leave unchanged."""
    model = engine._assembly.target.tree_model
    rows = [layer.filled for layer in model.cache.rows]
    return rows, model.cache.length, model.synchronize, model.on_layer, torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("one slot", 0.0),
        ("streamed with its head", 0.02),
        pytest.param("copied and read", 0.0, marks=pytest.mark.exhaustive),
        pytest.param("resident", 0.0, marks=pytest.mark.exhaustive),
        pytest.param("head alone", 0.02, marks=pytest.mark.exhaustive),
    ],
)
def test_answers_after_a_benchmark_are_the_same(
    model: Path, expected: tuple[int, ...], name: str, seconds: float
) -> None:
    placement = PLACEMENTS[name]
    with tiny_engine(model, model, placement=placement) as engine:
        empty = _state(engine)
        for _ in range(2):
            measured = _try(engine, seconds)
            assert _state(engine) == empty
            assert (measured.link is None) == ("disk" not in placement.tiers and placement.head != "disk")
            assert engine.generate(PROMPT, PARAMS).token_ids == expected
            assert engine.generate(PROMPT, PARAMS).reused_tokens == len(PROMPT) - 1


def test_stopped_and_complete_passes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine(model, "none", budget=64, slots=2) as engine:
        target = engine._assembly.target
        real, layers = target.recover, list[int]()

        def recover() -> None:
            layers.append(target.tree_model.pass_time.layers)
            real()

        monkeypatch.setattr(target, "recover", recover)
        monkeypatch.setattr(trial, "_LINK_SECONDS", 0.0)
        _try(engine, 0.0)
        assert layers and set(layers[:-1]) == {3}, "no time: after the least number of layers"
        layers.clear()
        PassBenchmark(target, CALIBRATION, CAPACITY)._one(2, 100.0)
        assert not layers and target.tree_model.pass_time.layers == LAYERS
        target.tree_model.cache.rewind(0)


def test_interrupt_leaves_no_changes(
    model: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(model, model, slots=2) as engine:
        before = _state(engine)
        layer = engine._assembly.target.skeleton.layers[3]

        def interrupt(*given: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(layer.mlp, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _try(engine, 600.0)  # or a busy machine cuts every pass short before that layer
        monkeypatch.undo()
        assert _state(engine) == before
        assert engine.generate(PROMPT, PARAMS).token_ids == expected


def test_benchmark_measures_rows_times_and_the_link(model: Path) -> None:
    steps = list[tuple[int, int]]()
    with tiny_engine(model, "none", budget=64, slots=2) as engine:
        target = engine._assembly.target
        measured = PassBenchmark(target, CALIBRATION, CAPACITY).measure(
            lambda done, total: steps.append((done, total)), 0.0
        )
        assert [rows for rows, _ in measured.layer] == [2, 16, 64, 128] == [r for r, _ in measured.outside]
        assert all(seconds > 0 for _, seconds in measured.layer)
        assert all(seconds >= 0 for _, seconds in measured.outside) and measured.walk > 0
        assert measured.link is not None
        assert 0 < measured.link.low <= measured.link.value <= measured.link.high
        assert steps == [(0, 5), (1, 5), (2, 5), (3, 5), (5, 5)]
        sizes = sizes_of(target, "tiny")
        machine = measured_hardware(target, measured, sizes)
        assert machine.disk == measured.link and machine.link is None
        assert machine.processor.flops(2) == pytest.approx(4 * sizes.weights / measured.layer[0][1])
        costs = measured.costs(sizes, engine._assembly.placement, 2.0)
        assert costs.link > 0 and costs.compute_seconds(64) > 0


@pytest.mark.parametrize("disturbed", [2, 64])
def test_other_load_during_one_row_count_is_ignored(
    model: Path, monkeypatch: pytest.MonkeyPatch, disturbed: int
) -> None:
    """Otherwise trees of that size would cost the same as larger ones, and a plan would prefer those."""
    tried = list[int]()

    def passes(own: PassBenchmark, rows: int, seconds: float) -> tuple[float, float, float]:
        tried.append(rows)
        slow = rows == disturbed and tried.count(rows) == 1
        return (float(rows) + slow * 1000.0), 1.0, 0.0

    with tiny_engine(model, "none", budget=64, slots=2) as engine:
        monkeypatch.setattr(PassBenchmark, "_pass", passes)
        monkeypatch.setattr(PassBenchmark, "link", lambda own: None)
        measured = _try(engine, 60.0)
    assert measured.layer == tuple((rows, float(rows)) for rows in (2, 16, 64, 128))
    assert not measured.cpu


@pytest.mark.parametrize("context", sampled_params([2, 17], 2))
def test_small_context(model: Path, context: int) -> None:
    with tiny_engine(model, "none", budget=1, context=context) as engine:
        measured = PassBenchmark(engine._assembly.target, [], context + 1).measure(nothing, 0.0)
        assert measured.layer and engine._assembly.target.tree_model.cache.length == 0


def test_benchmark_without_streaming_has_no_link_speed(model: Path) -> None:
    with tiny_engine(model, "none", placement=PLACEMENTS["resident"]) as engine:
        looks: list[int] = []
        target = engine._assembly.target
        trial = PassBenchmark(target, CALIBRATION, CAPACITY, check_contention=lambda: looks.append(1))
        trial.measure(nothing, 0.0)
        assert len(looks) >= len(target.layers) and target.tree_model.check_cancelled is None
        assert target.ring_stats == RingStats() and trial.link() is None


def _drafter(engine: Engine) -> LMDrafter:
    (drafter,) = engine._assembly.sources.drafters.values()
    assert isinstance(drafter, LMDrafter)
    return drafter


Steps = tuple[tuple[tuple[int, float], ...], float]


def _steps(engine: Engine, budget: int = 64, ids: list[int] = CALIBRATION) -> Steps:
    return measure_steps(_drafter(engine), TargetParts(engine._assembly.target), ids, budget, 1.0)


@pytest.mark.parametrize(
    ("lean", "budget"), sampled_params([(False, 1), (True, 5), (True, 64)], (False, 1), (True, 5))
)
def test_steps_leave_the_draft_empty(model: Path, expected: tuple[int, ...], lean: bool, budget: int) -> None:
    with tiny_engine(model, model, budget=64, lean=lean) as engine:
        draft = _drafter(engine)._model
        assert isinstance(draft, FusedModel) == lean
        points, start = _steps(engine, budget)
        assert draft.cache.length == 0 and start >= 0
        assert all(0 < width <= budget for width, _ in points)
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points)), "wider is never faster"
        assert all(seconds > 0 for _, seconds in points)
        assert engine.generate(PROMPT, PARAMS).token_ids == expected
        _steps(engine, budget)
        assert draft.cache.length == 0
        assert engine.generate(PROMPT, PARAMS).token_ids == expected


def test_steps_with_little_text_and_a_failing_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine(model, model) as engine:
        for ids in ([7], CALIBRATION[:9]):
            assert _steps(engine, ids=ids)[0]
        calls, real = iter(range(100)), LMDrafter.expand

        def failing(self: LMDrafter, *given: object) -> object:
            if next(calls) == 4:
                raise MemoryError
            return real(self, *given)

        monkeypatch.setattr(LMDrafter, "expand", failing)
        with pytest.raises(MemoryError):
            _steps(engine)
        assert _drafter(engine)._model.cache.length == 0


def test_points_are_monotonic_and_disturbances_are_dropped() -> None:
    noisy = [(1, 5.0), (1, 3.0), (4, 2.0), (8, 4.5), (8, 0.1), (9, 9.0), (16, 1.0), (40, 7.0), (64, 6.0)]
    points, start = draft_trial._by_width(noisy, [9.0, 8.0, 1.0])
    assert points == ((1, 4.0), (4, 4.0), (8, 4.5), (16, 4.5), (64, 6.0)) and start == 4.0
    assert draft_trial._by_width([], [2.0, 4.0, 3.0]) == (((1, 3.0),), 0.0)
    assert draft_trial._by_width([(4, 2.0)], [1.0])[1] == 0.0, "a first step that took less costs nothing"
    assert make_monotonic([(16, 3.0), (1, 2.0), (2, 1.0), (64, 2.5)]) == (
        (1, 1.0),
        (2, 1.0),
        (16, 2.5),
        (64, 2.5),
    )


def test_model_of_two_layers_is_never_cut_short(tmp_path: Path) -> None:
    target = open_model(write_model(tmp_path / "model", num_hidden_layers=2))
    target.load(Placement.in_memory(2, (), 2), 64, nothing)
    try:
        PassBenchmark(target, CALIBRATION, 64).measure(nothing, 0.0)
        assert target.tree_model.pass_time.layers == 2
    finally:
        target.close()
