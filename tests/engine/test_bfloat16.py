"""Tokens in bfloat16, where the last bit decides near-ties, do not depend on other rows of a pass."""

from collections.abc import Iterator

import pytest
import torch

from offspec.engine.engine import Engine
from offspec.model import runner
from tests.support.answers import TargetAndDrafts, sampling, write_trio
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import tiny_engine

PARAMS = {temperature: sampling(temperature) for temperature in (0.0, 1.0)}
CASES = [
    (64, 64, "near", 1.0),
    (100, 7, "target", 0.0),
    (1024, 256, "near", 0.0),
    (1024, 64, "hostile", 1.0),
    (64, 256, "hostile", 0.0),
    (100, 1, "near", 1.0),
]


def _prompt(length: int) -> list[int]:
    return [3 + (7 * i * i + i) % 2900 for i in range(length)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TargetAndDrafts:
    sizes = {"vocab_size": 3000, "hidden_size": 128, "intermediate_size": 256}
    return write_trio(tmp_path_factory.mktemp("models"), 3, **sizes)


@pytest.fixture(scope="module")
def alone(large: TargetAndDrafts) -> Iterator[Engine]:
    with tiny_engine(large.target, "none", budget=1, context=512, dtype=torch.bfloat16) as engine:
        yield engine


@pytest.mark.parametrize(("chunk", "budget", "draft", "temperature"), sampled_params(CASES, *CASES[:2]))
def test_trees_drafts_chunks_and_what_is_kept_change_nothing(
    chunk: int, budget: int, draft: str, temperature: float, large: TargetAndDrafts, alone: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Attention key by key and in blocks of keys; the longer prompt begins with the shorter."""
    params = PARAMS[temperature]
    alone._states.first.forget()
    long, short = (alone.generate(_prompt(length), params).token_ids for length in (420, 70))
    monkeypatch.setattr(runner, "CHUNK", chunk)
    given = {"budget": budget, "context": 512, "dtype": torch.bfloat16}
    with tiny_engine(large.target, getattr(large, draft), **given) as engine:
        assert [engine.generate(_prompt(length), params).token_ids for length in (70, 420)] == [short, long]
