"""A batch gives each sequence the states that it has alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offspec.core.errors import StreamError
from offspec.distill.batched_forward import Batch
from offspec.distill.generate_batch import TrainingPrompt, generate_answers
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec_planners.placement import Placement
from tests.distill.classroom import QUESTIONS, loaded
from tests.support.tiny_models import nothing, open_model, reference

# Windows, soft caps, learned positions, sinks and experts, parallel blocks.
FAMILIES = ["mistral", "gemma2", "gpt2", "gpt_oss", "cohere2"]
GREEDY = [TrainingPrompt(question.ids, 0.0) for question in QUESTIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[LoadedModel]:
    model = loaded(folder, spread=0.5)
    yield model
    model.close()


def alone(target: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the states [n, H] of one sequence, as the engine computes them."""
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
    with batch.patched_target():
        first, _ = batch.run(tokens[:, :7])
        steps = [batch.run(tokens[:, at : at + 1])[0] for at in range(7, 10)]
        batch.keep(torch.tensor([0, 2]))
        last, _ = batch.run(tokens[[0, 2], 10:])
    torch.testing.assert_close(torch.cat([first, *steps], 1), expected[:, :10], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, expected[[0, 2], 10:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(alone(target, tokens[1]), expected[1])  # trees are as they were
    target.close()


def test_taps_are_the_inputs_of_layers(target: LoadedModel) -> None:
    seen: list[torch.Tensor] = []
    hook = target.skeleton.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batch = Batch(target, 5, taps=(1,))
    with batch.patched_target():
        _, (tap,) = batch.run(torch.randint(3, 96, (2, 5)))
    hook.remove()
    torch.testing.assert_close(tap, seen[0])
    assert tap.shape == (2, 5, 32)


def test_greedy_answers_are_those_of_transformers(target: LoadedModel, folder: Path) -> None:
    counts: list[int] = []
    passages = generate_answers(target, GREEDY, 10, frozenset(), step=counts.append)
    for question, passage in zip(GREEDY, passages, strict=True):
        said = passage.tokens[passage.prompt :].tolist()
        assert passage.tokens[: passage.prompt].tolist() == list(question.ids)
        assert said == reference(folder, question.ids, 10)
    assert counts[-1] == 40 and counts == sorted(counts), "progress counts what was written"


def test_an_answer_ends_at_its_eos_token(target: LoadedModel) -> None:
    whole = generate_answers(target, GREEDY, 12, frozenset())
    end = int(whole[1].tokens[whole[1].prompt + 3])
    cut = generate_answers(target, GREEDY, 12, frozenset({end}))
    for before, after in zip(whole, cut, strict=True):
        said = before.tokens[before.prompt :].tolist()
        length = said.index(end) + 1 if end in said else len(said)
        assert after.tokens[after.prompt :].tolist() == said[:length]
        torch.testing.assert_close(after.states, before.states[: len(after)], rtol=1e-4, atol=1e-4)
    assert len(cut[1]) < len(whole[1])


def test_a_seed_decides_what_is_sampled_and_streaming_changes_nothing(
    target: LoadedModel, folder: Path
) -> None:
    streamed = open_model(folder)
    streamed.load(Placement.in_memory(len(streamed.layers), [1], 2), 64, nothing)
    first, again, other = (
        [passage.tokens.tolist() for passage in generate_answers(model, QUESTIONS, 8, frozenset(), seed=seed)]
        for model, seed in ((target, 1), (streamed, 1), (target, 2))
    )
    assert first == again and first != other
    assert first[0] == other[0], "greedy"
    assert streamed.bytes_moved.streamed
    streamed.close()


def test_an_interrupted_batch_leaves_the_target_usable(target: LoadedModel) -> None:
    tokens = torch.arange(3, 9)
    expected = alone(target, tokens)

    def stop(count: int) -> None:
        if count > 6:
            raise StreamError("gone", file="x", offset=0)

    with pytest.raises(StreamError):
        generate_answers(target, QUESTIONS, 6, frozenset(), step=stop)
    torch.testing.assert_close(alone(target, tokens), expected)
