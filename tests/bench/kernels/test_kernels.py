"""The bench of kernels: its parts, and a run of each operation at tiny sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.kernels import __main__ as kernels
from bench.kernels import attention as kernels_attention
from bench.kernels import clock as kernels_clock
from bench.kernels import run as kernels_run
from bench.kernels import wanted as kernels_wanted
from bench.kernels.cases import OURS, Case, Op, Setting, Spec, parse_spec, rms_ratio, scattered, unlike
from bench.kernels.clock import Rates, peak_scratch, time_in_turns
from bench.kernels.wanted import CASES, WANTED, Wanted, speedups
from offspec_kernels.backend import Backend
from offspec_kernels.tree_attention import tree_attention
from tests.support.bench_runs import RunBench
from tests.support.kernel_device import device_of
from tests.support.products import some
from tests.support.simulated_cuda import is_simulated

CPU = torch.device("cpu")
RATES = Rates({"float32": 1e12, "bfloat16": 2e12}, 1e9)
TINY = (
    "tree_attention:30,7,4,2,16",
    "tree_attention:30,7,2,2,16:float32",
    "tree_scan:5,2,1,8,10",
    "tree_conv:5,20,3",
    "kv_compact:2,2,50,16,5",
    "gumbel_argmax:6,300",
    "topk_children:3,300,4:float32",
    "gumbel_noise:2,300:float32",
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measure_rates", lambda device, dtypes: RATES)
    monkeypatch.setattr(kernels_clock, "_TURNS", 2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("path", some(["eager", "triton"], "eager"))
def test_every_operation_is_told_ceiling_first(path: Backend, run_bench: RunBench) -> None:
    where = ("--device", device_of(path).type, "--path", path)
    ran = run_bench(kernels.main, "--seconds", "0", *where, "--shapes", *TINY)
    assert ran.code == 0 and ran.record | ran.summary == ran.record
    heads = [line.split()[0] for line in ran.lines if line.startswith(("ceiling", "reached"))]
    assert heads == ["ceiling", *["ceiling", "reached"] * len(TINY)]
    rows = ran.summary["cases"]
    assert [row["case"] for row in rows] == [str(parse_spec(text, kernels.OPS)) for text in TINY]
    for row in rows:
        assert row["right"] and row["path"] == path and row["checked"]["passed"] and not row["failed"]
        assert row["ceiling_seconds"] == max(row["products_seconds"], row["memory_seconds"]) > 0
        assert row["of_ceiling"] == pytest.approx(row["ceiling_seconds"] / row["ways"][OURS]["seconds"])
        assert len(row["ways"]) > 1 and row["speedup"]


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_is_not_timed(run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(*args: Any, path: Any = None, **more: Any) -> torch.Tensor:
        return tree_attention(*args, path=path, **more) * (1.0 if path == "reference" else 1.1)

    monkeypatch.setattr(kernels_attention, "tree_attention", nearly)
    ran = run_bench(kernels.main, "--seconds", "0", "--shapes", TINY[0], TINY[3])
    wrong, other = ran.summary["cases"]
    assert ran.code == 1 and not wrong["right"] and "ways" not in wrong and other["right"]
    assert sum("WRONG" in line for line in ran.lines) == 1


def _toy(rival: Callable[[], torch.Tensor], off_above: int = 1000) -> Op:
    """An operation whose result is nought, and something else at sizes above `off_above`."""

    def build(spec: Spec, setting: Setting) -> Case:
        def ours() -> torch.Tensor:
            return torch.full((spec.sizes[0],), float(spec.sizes[0] > off_above))

        ways: dict[str, Callable[[], Any]] = {OURS: ours, "rival": rival}
        return Case(8.0, 8, ways, lambda: torch.zeros(spec.sizes[0]), unlike, 0.0)

    return Op(("N",), {"N": 4}, build, lambda: build)


def _measure(op: Op, size: int) -> dict[str, Any]:
    return kernels_run.measure(
        Spec("toy", (size,), "float32"), op, Setting(CPU), RATES, 0.0, lambda row: None
    )


def test_a_case_that_is_wrong_at_its_own_size_alone_is_found_by_its_rivals() -> None:
    assert _measure(_toy(lambda: torch.zeros(50)), 50)["right"]
    row = _measure(_toy(lambda: torch.zeros(50), off_above=10), 50)
    assert row["checked"]["passed"] and not row["right"] and "ways" not in row
    assert row["rivals_differ_by"] == {"rival": 1.0}


def test_a_rival_that_cannot_run_is_left_out_and_told() -> None:
    def refuse() -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")

    row = _measure(_toy(refuse), 50)
    assert row["right"] and list(row["ways"]) == [OURS] and row["failed"] == {"rival": "no kernel"}


def test_nan_is_no_small_error() -> None:
    lost = torch.full((3,), torch.nan)
    assert not kernels_run.Checked(Spec("toy", (1,)), rms_ratio(lost, torch.ones(3)), 1.0).passed
    assert rms_ratio(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


def test_ways_take_turns_and_the_first_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(kernels_clock, "_TURNS", 3)

    def counting(call: Callable[[], Any]) -> tuple[float, float | None]:
        call()
        return float(len(said)), None

    found = time_in_turns({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, counting, 0.0)
    assert "".join(said) == "aabb" + "ab" * 2
    assert (found["a"].least, found["a"].seconds, found["a"].most, found["a"].runs) == (2.0, 5.0, 7.0, 3)


def test_scratch_is_what_was_held_beyond_what_is_left() -> None:
    def work() -> torch.Tensor:
        large = torch.empty(1 << 20)
        small = large[:1024] + 1
        del large
        return small

    assert peak_scratch(work, CPU) == pytest.approx(4 << 20, rel=0.01)
    assert peak_scratch(lambda: torch.empty(1 << 20), CPU) == 0


@pytest.mark.parametrize("name", kernels.OPS)
def test_scratch_is_stated_for_the_path_that_a_cpu_takes(name: str) -> None:
    assert "eager" in kernels.OPS[name].stated_scratch()


def test_the_attention_counts_what_is_seen() -> None:
    given = kernels_attention.Inputs(Spec("tree_attention", (50, 20, 4, 2, 8), "float32"), Setting(CPU))
    assert given.pairs == int((given.mask() == 0).sum()) == 50 * 20 + int(given.sees.sum())
    assert given.mask_bytes == given.mask().nbytes
    assert given.nbytes == 4 * 8 * (2 * 20 * 4 + 2 * 70 * 2)
    sees = given.sees.float()
    assert bool(given.sees.diagonal().all()) and not given.sees.triu(1).any()
    assert torch.equal(sees @ sees > 0, given.sees), "an ancestor's ancestor is one"
    assert 5 < int(given.sees.sum(dim=1).max()) < 20, "neither flat nor a chain"


def test_ceilings_and_speedups() -> None:
    assert RATES.seconds(2e12, 3e9, "bfloat16") == (1.0, 3.0)
    seconds = {OURS: 2.0, "sdpa_gqa": 8.0, "sdpa_folded": 6.0, "flex": 2.0}
    assert speedups(seconds) == {"sdpa": 3.0, "flex": 1.0}
    wanted = Wanted({"sdpa": 2.0, "flex": 1.3, "other": 9.0}, of_ceiling=0.5)
    assert wanted.missed(speedups(seconds), 0.5) == ["1.00 times flex, 1.3 wanted"]
    assert wanted.missed({}, 0.4) == ["0.40 of the ceiling, 0.5 wanted"]
    row = {"case": "x", "ceiling_seconds": 1.0, "ways": {name: {"seconds": s} for name, s in seconds.items()}}
    assert kernels_wanted.judged(row, "cpu")["of_ceiling"] == 0.5


def test_what_is_wanted_is_measured() -> None:
    for device, texts in CASES.items():
        assert [str(parse_spec(text, kernels.OPS)) for text in texts] == list(texts)
        assert set(WANTED[device]) <= set(texts)
    assert {spec.partition(":")[0] for spec in CASES["cpu"]} == set(kernels.OPS)


def test_a_path_is_scattered_over_its_tree() -> None:
    assert scattered(3, 10, 16) == [11, 13, 15] and scattered(2, 5, 7) == [5, 6]


@pytest.mark.gpu
@pytest.mark.skipif(is_simulated(), reason="a simulated device has no clock")
@pytest.mark.usefixtures("quick")
def test_every_operation_is_measured_on_a_gpu(run_bench: RunBench) -> None:
    ran = run_bench(kernels.main, "--seconds", "0", "--device", "cuda", "--shapes", *TINY)
    assert ran.code == 0 and all("asking_seconds" in row["ways"][OURS] for row in ran.summary["cases"])
    assert peak_scratch(lambda: torch.empty(1 << 20, device="cuda") and None, torch.device("cuda")) >= 4 << 20
