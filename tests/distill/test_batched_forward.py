"""A batch computes what its sequences would alone."""

from pathlib import Path

import pytest
import torch

from offspec.core.errors import StreamError
from offspec.distill.batched_forward import Batch
from offspec.distill.generate_batch import Question, answer
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec_planners.placement import Placement
from tests.distill.classroom import QUESTIONS, loaded
from tests.support.tiny_models import load_all, nothing, open_model, reference, write_model

FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "qwen2_moe", "cohere2", "phi"]


def alone(target: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The states [n, H] of one sequence, as the engine makes them."""
    target.tree_model.cache.rewind(0)
    with torch.no_grad():
        states = target.tree_model.hidden(tokens, TreeContext.chain(len(tokens), target.device))
    target.tree_model.cache.commit(len(tokens), [])
    return states


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_each_sequence_alone(tmp_path: Path, family: str) -> None:
    target = loaded(tmp_path, family)
    tokens = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([alone(target, row) for row in tokens])
    batch = Batch(target, 12)
    with batch.running():
        first, _ = batch.run(tokens[:, :7])
        steps = [batch.run(tokens[:, at : at + 1])[0] for at in range(7, 10)]
        batch.keep(torch.tensor([0, 2]))
        last, _ = batch.run(tokens[[0, 2], 10:])
    torch.testing.assert_close(torch.cat([first, *steps], 1), expected[:, :10], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, expected[[0, 2], 10:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone(target, tokens[1]), expected[1])  # trees are as they were
    target.close()


def test_taps_are_what_enters_layers(tmp_path: Path) -> None:
    target = loaded(tmp_path)
    seen: list[torch.Tensor] = []
    hook = target.skeleton.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = torch.randint(3, 96, (2, 5))
    batch = Batch(target, 5, taps=(1,))
    with batch.running():
        _, (tap,) = batch.run(tokens)
    hook.remove()
    torch.testing.assert_close(tap, seen[0])
    assert tap.shape == (2, 5, 32)
    target.close()


def test_greedy_answers_are_those_of_transformers(tmp_path: Path) -> None:
    target = loaded(tmp_path, spread=0.5)
    greedy = [Question(question.ids, 0.0) for question in QUESTIONS]
    for question, passage in zip(greedy, answer(target, greedy, 10, frozenset()), strict=True):
        said = passage.tokens[passage.prompt :].tolist()
        assert passage.tokens[: passage.prompt].tolist() == list(question.ids)
        assert said == reference(tmp_path, question.ids, 10)
    target.close()


def test_an_answer_ends_where_it_is_told_to(tmp_path: Path) -> None:
    target = loaded(tmp_path, spread=0.5)
    greedy = [Question(question.ids, 0.0) for question in QUESTIONS]
    whole = answer(target, greedy, 12, frozenset())
    end = int(whole[1].tokens[whole[1].prompt + 3])
    cut = answer(target, greedy, 12, frozenset({end}))
    for before, after in zip(whole, cut, strict=True):
        said = before.tokens[before.prompt :].tolist()
        length = said.index(end) + 1 if end in said else len(said)
        assert after.tokens[after.prompt :].tolist() == said[:length]
        torch.testing.assert_close(after.states, before.states[: len(after)], rtol=1e-4, atol=1e-4)
    assert len(cut[1]) < len(whole[1])
    target.close()


def test_a_seed_decides_what_is_sampled(tmp_path: Path) -> None:
    target = loaded(tmp_path)
    said = [
        [passage.tokens.tolist() for passage in answer(target, QUESTIONS, 8, frozenset(), seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert said[0] == said[1]
    assert said[0] != said[2]
    assert said[0][0] == said[2][0]  # greedy
    target.close()


def test_a_streamed_target_says_the_same(tmp_path: Path) -> None:
    whole = loaded(tmp_path)
    streamed = open_model(tmp_path)
    streamed.load(Placement.in_memory(len(streamed.layers), [1], 2), 64, nothing)
    said = [answer(target, QUESTIONS, 6, frozenset(), seed=4) for target in (whole, streamed)]
    assert [one.tokens.tolist() for one in said[0]] == [one.tokens.tolist() for one in said[1]]
    assert streamed.bytes_streamed
    whole.close()
    streamed.close()


def test_a_batch_that_was_broken_off_leaves_the_target_usable(tmp_path: Path) -> None:
    target = open_model(write_model(tmp_path))
    target.load(Placement.in_memory(len(target.layers), [], 2), 64, nothing)
    tokens = torch.arange(3, 9)
    expected = alone(target, tokens)

    def stop(count: int) -> None:
        if count > 6:
            raise StreamError("gone", file="x", offset=0)

    with pytest.raises(StreamError):
        answer(target, QUESTIONS, 6, frozenset(), step=stop)
    torch.testing.assert_close(alone(target, tokens), expected)
    target.close()


def test_progress_counts_what_was_written(tmp_path: Path) -> None:
    target = open_model(write_model(tmp_path))
    load_all(target, 64)
    counts: list[int] = []
    passages = answer(target, QUESTIONS, 5, frozenset(), step=counts.append)
    assert counts[-1] == sum(len(passage) - passage.prompt for passage in passages) == 20
    assert counts == sorted(counts)
    target.close()
