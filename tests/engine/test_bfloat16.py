"""In bfloat16, where the last bit decides between near-equal tokens: the same, whatever else a pass holds."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from offspec.model import runner
from tests.support.products import some
from tests.support.tiny_models import disturb, tiny_engine, write_model

TEMPERATURES = (0.0, 1.0)
LENGTHS = (70, 420)  # tokens of a prompt: keys that are all met one by one, and keys in blocks
SIZES = {"vocab_size": 3000, "hidden_size": 128, "intermediate_size": 256}


def _prompt(length: int) -> list[int]:
    return [3 + (7 * i * i + i) % 2900 for i in range(length)]


def _sampling(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    """A target, a draft that agrees with it in part, and one that never does."""
    folder = tmp_path_factory.mktemp("models")
    target, near = (write_model(folder / name, **SIZES) for name in ("target", "near"))
    disturb(near)
    yield target, near, write_model(folder / "hostile", "qwen2", seed=5, **SIZES)


Answers = Callable[[float], dict[int, tuple[int, ...]]]


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path, Path]) -> Iterator[Answers]:
    """What is said at a temperature, by the length of the prompt."""
    with tiny_engine(models[0], "none", budget=1, context=512, dtype=torch.bfloat16) as engine:
        yield cache(
            lambda t: {length: engine.generate(_prompt(length), _sampling(t)).token_ids for length in LENGTHS}
        )


@pytest.mark.parametrize(
    ("chunk", "budget", "draft", "temperature"),
    some(
        product((64, 100, 1024), (1, 7, 64, 256), (0, 1, 2), TEMPERATURES),
        *((64, 64, 1, 1.0), (100, 7, 0, 0.0)),
        one_in=3,
    ),
)
def test_trees_drafts_and_chunks_change_nothing(
    models: tuple[Path, Path, Path],
    expected: Answers,
    draft: int,
    budget: int,
    chunk: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = expected(temperature)
    monkeypatch.setattr(runner, "CHUNK", chunk)
    given = {"budget": budget, "context": 512, "dtype": torch.bfloat16}
    with tiny_engine(models[0], models[draft], **given) as engine:
        for length, tokens in answers.items():
            assert engine.generate(_prompt(length), _sampling(temperature)).token_ids == tokens


@pytest.mark.parametrize("temperature", some(TEMPERATURES, 1.0))
def test_what_is_kept_of_a_prompt_changes_nothing(
    models: tuple[Path, Path, Path], expected: Answers, temperature: float
) -> None:
    """The longer prompt begins with the shorter, whose keys came in another chunk."""
    with tiny_engine(models[0], models[1], context=512, dtype=torch.bfloat16) as engine:
        engine.generate(_prompt(70), _sampling(temperature))
        result = engine.generate(_prompt(420), _sampling(temperature))
        assert result.token_ids == expected(temperature)[420]
