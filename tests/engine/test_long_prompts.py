"""Prompts longer than a pass are divided among several passes; tokens stay the same."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import offspec
from offspec.core.events import PassStats, TextDelta
from offspec.model import runner
from offspec.model.pass_parts import SequenceRows
from offspec_planners.cost import PassCosts
from offspec_planners.placement import Placement, Tier
from tests.support import eagle_files
from tests.support.answers import PROMPT, TargetAndDrafts, sampling
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import reference, tiny_engine, write_hybrid, write_model

LONG = PROMPT * 4
CASES: dict[str, dict[str, Any]] = {
    "llama, suffix": {"placement": Placement((Tier.DISK,) * 3, 2, 0, Tier.DISK)},
    "mistral, auto": {"budget": 16, "chunk": 5},
    "qwen3_next, suffix": {"budget": 8},
}


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize("case", sampled_params(CASES, "llama, suffix", "mistral, auto"))
def test_in_several_passes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, draft = case.split(", ")
    folder = (write_hybrid if family == "qwen3_next" else write_model)(tmp_path, family)
    monkeypatch.setattr(runner, "PASS_ROWS", 7)
    rows, hidden = list[int](), runner.TreeModel.hidden_of

    def counted(model: runner.TreeModel, sequences: Sequence[SequenceRows]) -> Any:
        rows.append(sum(len(sequence.tokens) for sequence in sequences))
        return hidden(model, sequences)

    with tiny_engine(folder, draft, **CASES[case]) as engine:
        target = engine._assembly.target.tree_model
        monkeypatch.setattr(target, "hidden_of", lambda *given: counted(target, *given))
        found = engine.generate(LONG, sampling(0.0, 16))
        assert list(found.token_ids) == reference(folder, LONG, 16)
        assert rows[:4] == [7] * 4 and rows[4] - engine.budget <= 7
        more = [*LONG, *found.token_ids[:4], *LONG]
        assert list(engine.generate(more, sampling(0.0, 8)).token_ids) == reference(folder, more, 8)


def test_layer_inputs_of_one_pass_are_gone_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE-3 head taps layers; what it was given of a long prompt's pass is as large as that pass."""
    write_model(tmp_path / "target", num_hidden_layers=eagle_files.LAYERS)
    eagle_files.write_head(tmp_path / "head", eagle_files.make_head("eagle3"))
    monkeypatch.setattr(runner, "PASS_ROWS", 7)
    tapped, refs, alive = runner.TreeModel._keep_states, list[weakref.ref[Tensor]](), list[int]()

    def watched(model: runner.TreeModel, states: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in refs))
        found = tapped(model, states)
        refs.append(weakref.ref(found))
        return found

    monkeypatch.setattr(runner.TreeModel, "_keep_states", watched)
    size: dict[str, Any] = {"dtype": "float32", "context": 160, "budget": 8, "width": 4}
    with offspec.load(str(tmp_path / "target"), draft=str(tmp_path / "head"), **size) as engine:
        alive.clear()
        found = engine.generate(LONG, sampling(0.0, 4))
    assert list(found.token_ids) == reference(tmp_path / "target", LONG, 4)
    assert len(alive) > 12 and max(alive) < 3  # three layers are tapped in a pass


@pytest.mark.usefixtures("drafters_stay")
def test_no_tree_behind_a_prompt_whose_rows_are_dear(trio: TargetAndDrafts) -> None:
    """If nodes cost more than their expected gain, the first pass contains only the prompt."""
    dear = PassCosts(compute=((1, 1.0), (18, 1.0), (19, 4.0), (20, 7.0)), step=((1, 0.001),))
    nodes, said = dict[bool, list[int]](), list[list[int]]()
    for priced in (False, True):
        with tiny_engine(trio.target, trio.target, budget=16, width=4) as engine:
            policy = engine.drafting.policy
            growth = replace(policy.growth, costs=dear if priced else None)
            engine.set_draft_policy(replace(policy, growth=growth, may_pause=False))
            events = list(engine.stream(LONG, sampling(0.0, 16)))
        nodes[priced] = [event.tree_nodes for event in events if isinstance(event, PassStats)]
        said.append([token for event in events if isinstance(event, TextDelta) for token in event.token_ids])
    assert said == [reference(trio.target, LONG, 16)] * 2
    assert nodes[False][0] > 1
    assert nodes[True][0] == 1 < nodes[True][1]
