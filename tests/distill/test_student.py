"""Training and publishing heads: losses fall, files open, and figures are correct."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec.distill.config import TimeLimit
from offspec.distill.eagle3 import Eagle3Student, layer_config
from offspec.distill.embed_head import EmbeddingAndHead
from offspec.distill.medusa import MedusaStudent
from offspec.distill.mlp import MLPStudent
from offspec.distill.student import Student, Teacher, read_training_batch
from offspec.distill.train import RANKS, HeadAcceptance, Schedule, Training, measure_head
from offspec.draft.base import Features
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.open import open_head
from offspec.model.parts import TargetParts
from tests.distill.classroom import TAPS, School
from tests.support.drafter_logits import RecordingScorer

CPU = torch.device("cpu")
STUDENTS: dict[str, Callable[[School, EmbeddingAndHead], Student]] = {
    "medusa": lambda school, embed_head: MedusaStudent(embed_head, 3, 2),
    "mlp": lambda school, embed_head: MLPStudent(embed_head, 3, 40),
    "eagle3": lambda school, embed_head: Eagle3Student(embed_head, 3, TAPS, school.target.skeleton.config),
}


def ignore(*args: object) -> None:
    """Ignore progress."""


def training(kind: str, school: School, state: Path, epochs: int = 3) -> tuple[Student, Training]:
    torch.manual_seed(0)
    student = STUDENTS[kind](school, school.embed_head)
    schedule = Schedule(epochs=epochs, rows=100, rate=5e-3)
    return student, Training(student, school.store, school.embed_head, schedule, state, "test")


@pytest.mark.parametrize("kind", list(STUDENTS))
def test_losses_use_the_target_s_distribution(school: School, kind: str) -> None:
    """Compare with cross-entropy per row over the whole vocabulary, with all tokens common."""
    embed_head = school.full_embed_head
    student = STUDENTS[kind](school, embed_head)
    batch = read_training_batch(school.store, [0], CPU, whole=student.whole)
    teacher = Teacher.of(embed_head, embed_head.draw(5, torch.Generator()), batch)
    with torch.no_grad():
        losses = [float(loss) for loss in student.losses(batch, teacher)]
        odds = embed_head.all_logits(batch.states).softmax(-1)
        for depth, scores in enumerate(student.predictions(batch)):
            # The last row has odds but no next token, so predictions lack it.
            each = -(odds[scores.truth - 1] * scores.logits.log_softmax(-1)).sum(-1)
            count = len(batch.rows_before(depth + 1))
            assert len(each) == count - 1 or kind == "mlp"
            assert losses[depth] == pytest.approx(float(each.mean()), rel=0.1)


@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_an_interrupted_training_resumes_exactly(school: School, tmp_path: Path, kind: str) -> None:
    whole, batches = training(kind, school, tmp_path / "whole.pt")
    batches.run(ignore)

    def stop(step: int, total: int, loss: str) -> None:
        if step == 4:
            raise KeyboardInterrupt

    _, batches = training(kind, school, tmp_path / "parts.pt")
    with pytest.raises(KeyboardInterrupt):
        batches.run(stop)
    parts, batches = training(kind, school, tmp_path / "parts.pt")
    assert batches.resumed
    batches.run(ignore)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(parts.module.state_dict()[name], value), name


def test_the_state_of_another_training_is_not_resumed(school: School, tmp_path: Path) -> None:
    def open_training(name: str) -> Training:
        student = MedusaStudent(school.embed_head, 2, 1)
        return Training(student, school.store, school.embed_head, Schedule(epochs=1, rows=100), state, name)

    state = tmp_path / "state.pt"
    open_training("one").run(ignore)
    assert open_training("one").resumed
    assert not open_training("other").resumed
    state.write_bytes(b"damaged")
    assert not open_training("one").resumed


def test_time_ends_a_training(school: School, tmp_path: Path) -> None:
    schedule = Schedule(epochs=1000, minutes=1e-4, rows=100)
    student = MedusaStudent(school.embed_head, 2, 1)
    done = Training(student, school.store, school.embed_head, schedule, tmp_path / "state.pt", "x").run(
        ignore
    )
    assert 0 < done.steps < 1000


@pytest.mark.parametrize("kind", list(STUDENTS))
def test_figures_are_those_of_counting(school: School, kind: str) -> None:
    student = STUDENTS[kind](school, school.full_embed_head)
    numbers = [3, 5, 7]
    found = measure_head(student, school.store, numbers, CPU, TimeLimit(None), ignore)
    hits, counts = np.zeros((student.depth, RANKS)), np.zeros(student.depth)
    with torch.no_grad():
        for number in numbers:
            passage = school.store.read(number)
            batch = read_training_batch(school.store, [number], CPU, whole=student.whole)
            first = len(passage) - len(batch)
            for depth, scores in enumerate(student.predictions(batch)):
                for logits, row in zip(scores.logits, scores.truth.tolist(), strict=True):
                    rank = int((logits > logits[passage.tokens[first + row]]).sum())
                    counts[depth] += 1
                    if rank < RANKS:
                        hits[depth, rank] += 1
                # Every answer token can be predicted; the question's last token is the first root.
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


@pytest.mark.parametrize("kind", list(STUDENTS))
def test_a_written_head_opens_with_the_same_predictions(school: School, tmp_path: Path, kind: str) -> None:
    """Train until the loss falls, then compare along the text, up to the trained depth."""
    losses: list[float] = []
    student, batches = training(kind, school, tmp_path / "state.pt", 10)
    done = batches.run(lambda step, total, loss: losses.append(float(loss.split()[1])))
    assert losses[-1] < losses[0] - 0.03
    assert done.epochs == 10 and done.steps == len(losses)
    student.to_checkpoint("some/target").write(tmp_path / "head")
    shape = TargetShape("some/target", 32, 96, 3, torch.float32, CPU, school.target.skeleton.config)
    opened = open_head(str(tmp_path / "head"), shape, ignore)
    assert opened is not None
    assert kind == "eagle3" or "(3 heads)" in opened.name
    drafter = opened.load(TargetParts(school.target), 64)
    passage = school.store.read(0)
    root, hearing = passage.prompt + 3, RecordingScorer()
    inputs = {layer: tap[:root] for layer, tap in zip(TAPS, passage.taps, strict=True)}
    drafter.observe(Features(0, passage.states[:root], inputs))
    tokens = passage.tokens.tolist()
    drafter.start(tokens[: root + 1])
    candidates = GrowingTree(tokens[root])
    candidates.graft(0, Subtree([-1, 0], tokens[root + 1 : root + 3], [-1.0, -1.0]), source=0)
    with torch.no_grad():
        for node in range(3):
            drafter.expand(candidates, [node], hearing)
        batch = read_training_batch(school.store, [0], CPU, whole=student.whole)
        first = len(passage) - len(batch)
        for depth, scores in enumerate(student.predictions(batch)):
            at = (scores.truth + first).tolist().index(root + 1 + depth)
            # Weights are published in bfloat16.
            expected = scores.logits[at].log_softmax(-1)
            torch.testing.assert_close(
                hearing.recorded_logits[depth].log_softmax(-1), expected, rtol=0.02, atol=0.05
            )
    drafter.close()


def test_a_head_for_a_target_whose_layers_differ() -> None:
    from transformers import Gemma4TextConfig

    config = layer_config(Gemma4TextConfig(hidden_size=2304, num_attention_heads=8), 100)
    assert (config.num_key_value_heads, config.head_dim) == (4, 288)
