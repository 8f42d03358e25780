"""Tokens per pass: the two means, and what a run sums up."""

from __future__ import annotations

import pytest

from bench import acceptance
from bench.acceptance import Answer


def answer(tokens: int, passes: int, verify: str = "coupled", temperature: float = 0.0) -> Answer:
    gaps = (0.01,) if temperature and verify == "plain" else ()
    return Answer("chat-1", "chat", verify, temperature, tokens, passes, 1.0, "length", "d", gaps)


def test_means_differ_as_they_should() -> None:
    found = acceptance.yield_of([answer(10, 1), answer(10, 9)])
    assert found.pooled == 2.0
    assert found.mean == pytest.approx((10 + 10 / 9) / 2)


def test_runs_are_told_as_shares_of_the_greedy_one() -> None:
    args = acceptance.main.parser().parse_args(["--check"])
    assert acceptance.settings(args) == [("coupled", 0.0), ("coupled", 1.0), ("plain", 1.0)]  # greedy once
    answers = [answer(20, 5), answer(20, 5, temperature=1.0), answer(15, 5, "plain", 1.0)]
    runs = {(run["verify"], run["temperature"]): run for run in acceptance.summarise(args, answers)["runs"]}
    assert runs["coupled", 1]["share_of_greedy"] == 1.0
    assert runs["plain", 1]["share_of_greedy"] == 0.75
    assert runs["plain", 1]["check"] == {"prompts": 1, "prompts_with_mismatch": 1, "gaps": [0.01]}
    assert runs["coupled", 0]["check"]["prompts_with_mismatch"] == 0
