"""Targets that support only single-path trees get no other trees and emit the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offspec.draft.grow.result import GrownTree
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.mixture import GrowthStats
from offspec.engine.sequence_pass import SequencePass
from offspec.model.probe import build
from offspec.model.probe.compare import TrialResult
from tests.support.answers import PROMPT, generate_tokens, sampling
from tests.support.tiny_models import write_model


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(("draft", "verify"), [("itself", "plain"), ("suffix", "coupled")])
def test_guesses_are_single_paths(
    verify: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    params = [sampling(temperature, 24) for temperature in (0.0, 0.9)]
    expected = generate_tokens(model, *params, prompt=PROMPT * 2)
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "run_trial", lambda config: TrialResult(False, True, "branches differ"))
    sent, rows = list[GrownTree](), SequencePass.rows

    def watched(sequence: SequencePass) -> Any:
        if sequence.grown is not None:
            sent.append(sequence.grown)
        return rows(sequence)

    monkeypatch.setattr(SequencePass, "rows", watched)
    guesses = model if draft == "itself" else draft
    assert generate_tokens(model, *params, draft=guesses, prompt=PROMPT * 2, verify=verify) == expected
    assert all(len(grown.tree) == grown.tree.depth.max() + 1 for grown in sent)
    assert any(len(grown.tree) > 2 for grown in sent)


def test_the_path_is_the_likeliest_or_the_first_drawn() -> None:
    every = GrowingTree(7)
    every.extend(np.array([0]), np.array([[3, 4]]), np.log([[0.2, 0.7]]))
    every.extend(np.array([1, 2]), np.array([[5, 6], [8, 9]]), np.log([[0.5, 0.4], [0.1, 0.8]]))
    nodes = np.arange(every.count)
    grown = GrownTree(every.tree(nodes), nodes, 2, every, GrowthStats())
    assert grown.one_path(drawn=False).tree.token.tolist() == [7, 4, 9]
    first = grown.one_path(drawn=True)
    assert first.tree.token.tolist() == [7, 3, 5]
    assert every.token[first.candidates].tolist() == [7, 3, 5]
