"""A prompt that is longer than a pass is taken in several, and says the same."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec import SamplingParams
from offspec.core.events import PassStats
from offspec.model import runner
from offspec.model.pass_parts import SequenceRows
from offspec_planners.cost import PassCosts
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.tiny_models import HYBRIDS, reference, tiny_engine, write_hybrid, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9] * 4
CASES: dict[str, dict[str, Any]] = {
    "llama, none": {"budget": 1},
    "llama, auto": {"budget": 16},
    "llama, suffix": {"placement": Placement((Tier.DISK,) * 3, 2, 0, Tier.DISK)},
    "mistral, auto": {"budget": 16, "chunk": 5},
    "qwen3_next, none": {"budget": 1},
    "qwen3_next, suffix": {"budget": 8},
}


@pytest.mark.parametrize("case", some(CASES, "llama, auto", "llama, suffix", "qwen3_next, suffix"))
def test_in_several_passes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, draft = case.split(", ")
    folder = (write_hybrid if family in HYBRIDS else write_model)(tmp_path, family)
    monkeypatch.setattr(runner, "PASS_ROWS", 7)
    rows, hidden = list[int](), runner.TreeModel.hidden_of

    def counted(model: runner.TreeModel, sequences: Sequence[SequenceRows]) -> Any:
        rows.append(sum(len(sequence.tokens) for sequence in sequences))
        return hidden(model, sequences)

    with tiny_engine(folder, draft, **CASES[case]) as engine:
        target = engine._assembly.target.tree_model
        monkeypatch.setattr(target, "hidden_of", lambda *given: counted(target, *given))
        found = engine.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
        assert list(found.token_ids) == reference(folder, PROMPT, 16)
        assert rows[:4] == [7] * 4 and rows[4] - engine.budget <= 7
        more = [*PROMPT, *found.token_ids[:4], *PROMPT]
        again = engine.generate(more, SamplingParams(max_tokens=8, ignore_eos=True))
        assert list(again.token_ids) == reference(folder, more, 8)


def test_no_tree_behind_a_prompt_whose_rows_are_dear(tmp_path: Path) -> None:
    """Where nodes cost more than they are expected to bring, the first pass has the prompt alone."""
    folder = write_model(tmp_path, "llama")
    dear = PassCosts(compute=((1, 1.0), (18, 1.0), (19, 4.0), (20, 7.0)), step=((1, 0.001),))
    nodes = dict[bool, list[int]]()
    for priced in (False, True):
        with tiny_engine(folder, str(folder), budget=16, width=4) as engine:
            policy = engine.drafting.policy
            growth = replace(policy.growth, costs=dear if priced else None)
            engine.follow(replace(policy, growth=growth, rests=False))
            events = list(engine.stream(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True)))
            found = [event for event in events if isinstance(event, PassStats)]
            nodes[priced] = [one.tree_nodes for one in found]
            tokens = [token for event in events for token in getattr(event, "token_ids", ())]
            assert tokens == reference(folder, PROMPT, 16)
    assert nodes[False][0] > 1
    assert nodes[True][0] == 1 < nodes[True][1]
