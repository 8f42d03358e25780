"""What is trained is what is published: losses fall, files open, and figures are counted right."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec.distill.config import TimeLimit
from offspec.distill.eagle3 import Eagle3, layer_config
from offspec.distill.embed_head import Ends
from offspec.distill.medusa import Medusa
from offspec.distill.mlp import MLP
from offspec.distill.student import Pupil, Teacher, read_lesson
from offspec.distill.train import RANKS, HeadAcceptance, Schedule, Training, measure_head
from offspec.draft.base import Features
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.open import open_head
from offspec.model.parts import TargetParts
from tests.distill.classroom import TAPS, School
from tests.support.asking import Hearing

CPU = torch.device("cpu")
PUPILS: dict[str, Callable[[School, Ends], Pupil]] = {
    "medusa": lambda school, ends: Medusa(ends, 3, 2),
    "mlp": lambda school, ends: MLP(ends, 3, 40),
    "eagle3": lambda school, ends: Eagle3(ends, 3, TAPS, school.target.skeleton.config),
}


def ignore(*args: object) -> None:
    """Progress that goes nowhere."""


def training(kind: str, school: School, state: Path, epochs: int = 3) -> tuple[Pupil, Training]:
    torch.manual_seed(0)
    pupil = PUPILS[kind](school, school.ends)
    schedule = Schedule(epochs=epochs, rows=100, rate=5e-3)
    return pupil, Training(pupil, school.store, school.ends, schedule, state, "test")


@pytest.mark.parametrize("kind", list(PUPILS))
def test_losses_are_against_the_target_s_odds(school: School, kind: str) -> None:
    """Row by row: cross-entropy over the whole vocabulary, where all of it is common."""
    ends = school.all_ends
    pupil = PUPILS[kind](school, ends)
    lesson = read_lesson(school.store, [0], CPU, whole=pupil.whole)
    teacher = Teacher.of(ends, ends.draw(5, torch.Generator()), lesson)
    with torch.no_grad():
        losses = [float(loss) for loss in pupil.losses(lesson, teacher)]
        odds = ends.all_logits(lesson.states).softmax(-1)
        for depth, scores in enumerate(pupil.guesses(lesson)):
            # The last row's odds are known, and not its token: the guesses lack it.
            each = -(odds[scores.truth - 1] * scores.logits.log_softmax(-1)).sum(-1)
            count = len(lesson.before(depth + 1))
            assert len(each) == count - 1 or kind == "mlp"
            assert losses[depth] == pytest.approx(float(each.mean()), rel=0.1)


@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_what_was_broken_off_goes_on_as_if_it_had_not_been(school: School, tmp_path: Path, kind: str) -> None:
    whole, lessons = training(kind, school, tmp_path / "whole.pt")
    lessons.run(ignore)

    def stop(step: int, total: int, loss: str) -> None:
        if step == 4:
            raise KeyboardInterrupt

    _, lessons = training(kind, school, tmp_path / "parts.pt")
    with pytest.raises(KeyboardInterrupt):
        lessons.run(stop)
    parts, lessons = training(kind, school, tmp_path / "parts.pt")
    assert lessons.resumed
    lessons.run(ignore)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(parts.module.state_dict()[name], value), name


def test_the_state_of_another_training_is_not_taken_up(school: School, tmp_path: Path) -> None:
    def open_training(name: str) -> Training:
        pupil = Medusa(school.ends, 2, 1)
        return Training(pupil, school.store, school.ends, Schedule(epochs=1, rows=100), state, name)

    state = tmp_path / "state.pt"
    open_training("one").run(ignore)
    assert open_training("one").resumed
    assert not open_training("other").resumed
    state.write_bytes(b"damaged")
    assert not open_training("one").resumed


def test_time_ends_a_training(school: School, tmp_path: Path) -> None:
    schedule = Schedule(epochs=1000, minutes=1e-4, rows=100)
    pupil = Medusa(school.ends, 2, 1)
    done = Training(pupil, school.store, school.ends, schedule, tmp_path / "state.pt", "x").run(ignore)
    assert 0 < done.steps < 1000


@pytest.mark.parametrize("kind", list(PUPILS))
def test_figures_are_those_of_counting(school: School, kind: str) -> None:
    pupil = PUPILS[kind](school, school.all_ends)
    numbers = [3, 5, 7]
    found = measure_head(pupil, school.store, numbers, CPU, TimeLimit(None), ignore)
    hits, counts = np.zeros((pupil.depth, RANKS)), np.zeros(pupil.depth)
    with torch.no_grad():
        for number in numbers:
            passage = school.store.read(number)
            lesson = read_lesson(school.store, [number], CPU, whole=pupil.whole)
            first = len(passage) - len(lesson)
            for depth, scores in enumerate(pupil.guesses(lesson)):
                for logits, row in zip(scores.logits, scores.truth.tolist(), strict=True):
                    rank = int((logits > logits[passage.tokens[first + row]]).sum())
                    counts[depth] += 1
                    if rank < RANKS:
                        hits[depth, rank] += 1
                # Whatever may be guessed of the answer, the question's last token being the first root.
                assert first + int(scores.truth.min()) == passage.prompt + depth
                assert len(scores.truth) == len(passage) - passage.prompt - depth
    np.testing.assert_allclose(found.acceptance, hits / counts[:, None])
    assert found.rows == counts[0]


def test_expected_tokens_of_a_tree() -> None:
    certain = np.zeros((2, RANKS))
    certain[:, 0] = 1
    assert HeadAcceptance(certain, 10).expected == pytest.approx(3)
    assert HeadAcceptance(certain * 0.5, 10).expected == pytest.approx(1.75)
    assert HeadAcceptance(certain, 0).expected == 1
    assert HeadAcceptance(certain, 10).first == (1, 1)
    assert HeadAcceptance(np.full((1, RANKS), 0.1), 10).fifth == pytest.approx((0.5,))


@pytest.mark.parametrize("kind", list(PUPILS))
def test_what_is_written_opens_and_guesses_the_same(school: School, tmp_path: Path, kind: str) -> None:
    """After training that lowers the loss: along the text itself, as deep as it was trained for."""
    losses: list[float] = []
    pupil, lessons = training(kind, school, tmp_path / "state.pt", 10)
    done = lessons.run(lambda step, total, loss: losses.append(float(loss.split()[1])))
    assert losses[-1] < losses[0] - 0.03
    assert done.epochs == 10 and done.steps == len(losses)
    pupil.published("some/target").write(tmp_path / "head")
    shape = TargetShape("some/target", 32, 96, 3, torch.float32, CPU, school.target.skeleton.config)
    opened = open_head(str(tmp_path / "head"), shape, ignore)
    assert opened is not None
    assert kind == "eagle3" or "(3 heads)" in opened.name
    drafter = opened.load(TargetParts(school.target), 64)
    passage = school.store.read(0)
    root, hearing = passage.prompt + 3, Hearing()
    inputs = {layer: tap[:root] for layer, tap in zip(TAPS, passage.taps, strict=True)}
    drafter.observe(Features(0, passage.states[:root], inputs))
    tokens = passage.tokens.tolist()
    drafter.start(tokens[: root + 1])
    candidates = GrowingTree(tokens[root])
    candidates.graft(0, Subtree([-1, 0], tokens[root + 1 : root + 3], [-1.0, -1.0]), source=0)
    with torch.no_grad():
        for node in range(3):
            drafter.expand(candidates, [node], hearing)
        lesson = read_lesson(school.store, [0], CPU, whole=pupil.whole)
        first = len(passage) - len(lesson)
        for depth, scores in enumerate(pupil.guesses(lesson)):
            at = (scores.truth + first).tolist().index(root + 1 + depth)
            # Weights are published in bfloat16.
            expected = scores.logits[at].log_softmax(-1)
            torch.testing.assert_close(hearing.heard[depth].log_softmax(-1), expected, rtol=0.02, atol=0.05)
    drafter.close()


def test_a_head_for_a_target_whose_layers_differ() -> None:
    from transformers import Gemma4TextConfig

    config = layer_config(Gemma4TextConfig(hidden_size=2304, num_attention_heads=8), 100)
    assert (config.num_key_value_heads, config.head_dim) == (4, 288)
