"""Runs whose budget and width were given fall back by themselves to passes of one row, and come back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import offspec
from offspec import Engine, Finished, PassStats, SamplingParams
from offspec.engine.sequence_pass import SequencePass
from offspec.ui.cli.render import statistics
from tests.support.answers import PROMPT, TargetAndDrafts, sampling
from tests.support.exhaustive import sampled_params

BUDGET = 24
FIRST, SECOND = sampling(1.0, 120), replace(sampling(1.0, 120), seed=8)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float], float], None]:
    """Return a function that fakes pass times: seconds by rows, and the part spent waiting for weights."""
    result: Any = SequencePass.result

    def take(seconds: Callable[[int], float], waited: float) -> None:
        def made_up(sequence: Any, *real: Any) -> Any:
            return result(sequence, 0.0, seconds(sequence.nodes), waited, 1, 0.0)

        monkeypatch.setattr(SequencePass, "result", made_up)

    return take


@pytest.fixture(params=sampled_params(["near", "near,suffix", "suffix"], "near,suffix"))
def engine(trio: TargetAndDrafts, request: pytest.FixtureRequest) -> Iterator[Engine]:
    draft = request.param.replace("near", str(trio.near))
    given = {"dtype": "float32", "context": 200, "budget": BUDGET, "width": 4, "learn": False}
    with offspec.load(trio.target, draft=draft, **given) as engine:
        assert engine.plan is None
        yield engine


def _answer(engine: Engine, params: SamplingParams) -> tuple[list[int], tuple[int, ...]]:
    """Return rows per pass of an answer, without the first pass with the prompt; and its tokens."""
    *events, last = engine.stream(PROMPT, params)
    assert isinstance(last, Finished)
    paused = [event.index for event in events if isinstance(event, PassStats) and event.paused]
    assert len(paused) == last.result.paused_passes
    nodes = [event.tree_nodes for event in events if isinstance(event, PassStats)]
    return nodes[1:], last.result.token_ids


def test_trees_that_lose_are_left_out(engine: Engine, take: Callable[..., None]) -> None:
    alone = [engine.generate(PROMPT, params, draft="none").token_ids for params in (FIRST, SECOND)]
    take(lambda rows: float(rows), 0.0)
    nodes, tokens = _answer(engine, FIRST)
    assert tokens == alone[0] and max(nodes) <= BUDGET
    assert max(nodes) > 1 and nodes.count(1) > len(nodes) / 2
    nodes, tokens = _answer(engine, SECOND)
    assert tokens == alone[1]
    result = engine.generate(PROMPT, SECOND)
    drafts = engine.draft != "suffix"
    assert (result.paused_passes > 0.5 * result.passes) == drafts, "lookups alone are not drafters"
    assert any("drafting was paused" in line for line in statistics(result)) == drafts
    assert nodes.count(1) > 0.9 * len(nodes), "what was seen is known to the next answer"


@pytest.mark.exhaustive
def test_trees_that_cost_nothing_go_on(engine: Engine, take: Callable[..., None]) -> None:
    alone = engine.generate(PROMPT, FIRST, draft="none").token_ids
    take(lambda rows: 1.0, 1.0)
    nodes, tokens = _answer(engine, FIRST)
    assert tokens == alone
    if engine.draft == "suffix":
        assert max(nodes) > 1
    else:
        assert min(nodes[:-2]) > 1, "the last tokens ask for no tree"
