"""Medusa heads in every published layout: the same guesses as the published formula, written naively."""

from pathlib import Path

import pytest
import torch

from offspec.core.config import SamplingParams
from offspec.core.errors import CheckpointError, DraftError, MissingTensorError
from offspec.core.events import unheard
from offspec.draft.base import Features, Scorer, Wants
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.heads.files import open_files
from offspec.draft.heads.medusa import OpenedMedusa, opened, recognises
from offspec.draft.heads.medusa_drafter import MedusaDrafter
from offspec.draft.heads.open import open_head
from offspec.model.parts import TargetParts
from offspec.sampling.logits_processor import LogitsProcessor
from offspec_planners.acceptance import Calibration
from tests.draft.asking import CALLS, Hearing, tree_below
from tests.support.heads_files import (
    HIDDEN,
    MEDUSA_CONFIG,
    Tensors,
    medusa_tensors,
    open_for_tiny,
    target_shape,
    vllm_names,
    write_head,
)
from tests.support.tiny_models import VOCABULARY, load_all, open_model, write_model

IDS = [5, 9, 17, 33, 64]
ROOT = len(IDS) - 1


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    target = open_model(write_model(tmp_path_factory.mktemp("target")))
    load_all(target, 64)
    return TargetParts(target)


def states(count: int, start: int = 0) -> Features:
    torch.manual_seed(count)
    return Features(start, torch.randn(count, HIDDEN), {})


def naive(
    tensors: Tensors, hidden: torch.Tensor, head: int, layers: int, output: torch.Tensor
) -> torch.Tensor:
    """The published formula for one head, [V]."""
    for layer in range(layers):
        z = tensors[f"{head}.{layer}.linear.weight"] @ hidden
        z = z + tensors.get(f"{head}.{layer}.linear.bias", torch.zeros(HIDDEN))
        hidden = hidden + z * torch.sigmoid(z)
    return output @ hidden


def open_medusa(folder: Path) -> OpenedMedusa:
    head = open_head(str(folder), target_shape(), unheard)
    assert isinstance(head, OpenedMedusa)
    return head


def heard(drafter: MedusaDrafter, features: Features) -> dict[int, torch.Tensor]:
    """The logits of the first node of each depth that was asked for, by depth."""
    hearing = Hearing()
    candidates = tree_below(IDS[-1])
    drafter.observe(features)
    drafter.start(IDS)
    for nodes in CALLS:
        drafter.expand(candidates, nodes, hearing)
    return {position - len(IDS): row for position, row in zip(hearing.positions, hearing.heard, strict=True)}


LAYOUTS = {
    "first version": (medusa_tensors(), "medusa_lm_head.pt", 1),
    "first version, safetensors": (medusa_tensors(), "medusa_lm_head.safetensors", 1),
    "two layers": (medusa_tensors(2, 2), "medusa_lm_head.pt", 2),
    "second version": (medusa_tensors(own=False), "medusa_lm_head.safetensors", 1),
    "no biases": (medusa_tensors(bias=False), "model.safetensors", 1),
}


@pytest.mark.parametrize(
    ("layout", "naming"),
    [
        *((layout, "plain") for layout in LAYOUTS),
        ("first version", "medusa_head."),
        ("second version", "medusa_heads."),
        ("two layers", "vllm"),
        ("no biases", "vllm"),
    ],
)
def test_each_layout_guesses_by_the_formula(
    tmp_path: Path, parts: TargetParts, layout: str, naming: str
) -> None:
    tensors, file, layers = LAYOUTS[layout]
    renamed = {("" if naming == "plain" else naming) + name: tensor for name, tensor in tensors.items()}
    stored = vllm_names(tensors) if naming == "vllm" else renamed
    head = open_medusa(write_head(tmp_path, MEDUSA_CONFIG, stored, file))
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    assert (head.kind, head.name) == ("medusa", f"medusa ({count} heads)")
    assert head.wants == Wants(last=True)
    assert head.shares_head == (layout == "second version")
    assert head.nbytes(999) == 4 * sum(tensor.numel() for tensor in tensors.values())
    features = states(ROOT)
    guessed = heard(head.load(parts, 64), features)
    assert sorted(guessed) == list(range(min(count, 4)))
    own = parts.project(torch.eye(HIDDEN)).T
    for depth, logits in guessed.items():
        output = tensors.get(f"{depth}.{layers}.weight", own)
        expected = naive(tensors, features.last[-1], depth, layers, output)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_every_node_of_a_depth_has_the_same_children(tmp_path: Path, parts: TargetParts) -> None:
    drafter = open_medusa(write_head(tmp_path, None, medusa_tensors(2), "medusa_lm_head.pt")).load(parts, 8)
    drafter.observe(states(ROOT))
    drafter.start(IDS)
    hearing = Hearing()
    children = drafter.expand(tree_below(IDS[-1]), [1, 2, 3, 6], hearing)
    assert len(hearing.heard) == 1
    assert (children.token[0] == children.token[1]).all()
    assert (children.log_prob[0] == children.log_prob[1]).all() and children.log_prob[0, 0] > -20
    assert (children.log_prob[2:] == -torch.inf).all()  # no head guesses below depth 2


def test_penalties_tell_paths_apart(tmp_path: Path, parts: TargetParts) -> None:
    drafter = open_medusa(write_head(tmp_path, None, medusa_tensors(2), "medusa_lm_head.pt")).load(parts, 8)
    drafter.observe(states(ROOT))
    drafter.start(IDS)
    said, other, third, _ = drafter.expand(tree_below(IDS[-1]), [1], Hearing()).token[0].tolist()
    candidates = GrowingTree(IDS[-1])
    candidates.graft(0, Subtree([-1, -1], [said, other], [-1.0, -1.0]), source=0)
    processor = LogitsProcessor(SamplingParams(temperature=0, presence_penalty=0.5), VOCABULARY, [])
    children = drafter.expand(candidates, [1, 2], Scorer(processor, None, Calibration()))
    first, second = (
        dict(zip(tokens, scores, strict=True))
        for tokens, scores in zip(children.token.tolist(), children.x.tolist(), strict=True)
    )
    fallen = (second[said] - second[third]) - (first[said] - first[third])
    assert fallen == pytest.approx(0.5, abs=1e-4)


def test_without_the_state_before_the_root_it_guesses_nothing(tmp_path: Path, parts: TargetParts) -> None:
    drafter = open_medusa(write_head(tmp_path, None, medusa_tensors(), "medusa_lm_head.pt")).load(parts, 8)
    candidates = tree_below(IDS[-1])

    def guesses() -> int:
        drafter.start(IDS)
        return int(drafter.expand(candidates, [0], Hearing()).token.shape[1])

    assert guesses() == 0
    drafter.observe(states(ROOT - 1))
    assert guesses() == 0  # of an earlier position
    drafter.observe(states(1, ROOT - 1))
    assert guesses() == 4
    drafter.rewind(ROOT)
    assert guesses() == 4
    drafter.rewind(ROOT - 1)
    assert guesses() == 0


def test_one_output_for_all_heads_and_a_map_of_tokens(tmp_path: Path, parts: TargetParts) -> None:
    tensors = vllm_names(medusa_tensors(rows=20))
    kept = torch.randperm(VOCABULARY)[:20]
    stored = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in ("lm_heads.1.weight", "lm_heads.2.weight")
    }
    config = {"model_type": "medusa", "original_lm_head": True, "truncated_vocab_size": 20}
    head = open_medusa(write_head(tmp_path, config, {**stored, "token_map": kept}))
    features = states(ROOT)
    guessed = heard(head.load(parts, 8), features)
    for depth, logits in guessed.items():
        expected = naive(medusa_tensors(rows=20), features.last[-1], depth, 1, tensors["lm_heads.0.weight"])
        torch.testing.assert_close(logits[kept], expected, rtol=1e-4, atol=1e-4)
        assert int(torch.isfinite(logits).sum()) == 20


def test_a_map_to_tokens_that_are_not_there(tmp_path: Path, parts: TargetParts) -> None:
    tensors = {**vllm_names(medusa_tensors(rows=20)), "token_map": torch.arange(20) + VOCABULARY - 19}
    with pytest.raises(DraftError, match="does not have"):
        open_medusa(write_head(tmp_path, {"model_type": "medusa"}, tensors))
    tensors["token_map"] = torch.zeros(20)
    with pytest.raises(DraftError, match="not of whole numbers"):
        open_medusa(write_head(tmp_path, {"model_type": "medusa"}, tensors))
    # A map is of no use without outputs.
    for index, tokens in enumerate((torch.empty(0), torch.zeros(2, 2), torch.tensor(1.5))):
        tensors = {**medusa_tensors(own=False), "token_map": tokens}
        head = open_medusa(write_head(tmp_path / str(index), MEDUSA_CONFIG, tensors))
        assert set(heard(head.load(parts, 8), states(ROOT))) == {0, 1, 2}


def test_heads_inside_a_whole_model(tmp_path: Path) -> None:
    """As in FasterDecoding/medusa-1.0-zephyr-7b-beta."""
    model = {"model.embed_tokens.weight": torch.zeros(4, 4), "model.norm.weight": torch.zeros(4)}
    heads = {f"medusa_head.{name}": tensor for name, tensor in medusa_tensors(5).items()}
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "medusa_num_heads": 5}
    head = open_medusa(write_head(tmp_path / "zephyr", config, {**model, **heads}))
    assert len(head.heads) == 5
    assert head.nbytes(0) == 4 * sum(tensor.numel() for tensor in heads.values())
    assert not recognises({"model_type": "llama"}, ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"])


def test_weights_are_cast_to_the_targets_dtype(tmp_path: Path, parts: TargetParts) -> None:
    halves = {name: tensor.half() for name, tensor in medusa_tensors().items()}
    drafter = open_medusa(write_head(tmp_path, None, halves, "medusa_lm_head.pt")).load(parts, 8)
    assert set(heard(drafter, states(ROOT))) == {0, 1, 2}


BROKEN: dict[str, tuple[dict[str, torch.Tensor | None], type[Exception], str]] = {
    "a missing layer": ({"1.0.linear.weight": None}, MissingTensorError, "layer 0 of its head 1"),
    "a missing output": ({"1.1.weight": None}, MissingTensorError, "output matrix of its head 1"),
    "a layer of another shape": ({"1.0.linear.weight": torch.zeros(8, 8)}, DraftError, r"\[8, 8\] and not"),
    "a bias of another shape": ({"1.0.linear.bias": torch.zeros(8)}, DraftError, r"\[8\] and not \[32\]"),
    "outputs of unlike rows": ({"1.1.weight": torch.zeros(95, 32)}, DraftError, r"\[95, 32\] and not"),
    "an output of another shape": ({"1.1.weight": torch.zeros(96)}, DraftError, r"\[96\] and not \[96, 32\]"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_heads_with_a_part_missing_or_wrong(tmp_path: Path, name: str) -> None:
    change, error, words = BROKEN[name]
    tensors = {key: value for key, value in {**medusa_tensors(), **change}.items() if value is not None}
    with pytest.raises(error, match=words) as caught:
        open_for_tiny(write_head(tmp_path, MEDUSA_CONFIG, tensors))
    assert "\n" not in str(caught.value)


def test_heads_that_are_not_there_or_twice(tmp_path: Path) -> None:
    tensors = {**medusa_tensors(), "medusa_head.0.0.linear.weight": torch.zeros(32, 32)}
    with pytest.raises(DraftError, match=r"twice, as '.*0\.0\.linear\.weight' and"):
        open_for_tiny(write_head(tmp_path / "twice", MEDUSA_CONFIG, tensors))
    folder = write_head(tmp_path, MEDUSA_CONFIG, {"model.norm.weight": torch.zeros(4)})
    with pytest.raises(MissingTensorError, match="no tensor of one"):
        open_for_tiny(folder)


def test_heads_of_another_target(tmp_path: Path) -> None:
    files = open_files(write_head(tmp_path, MEDUSA_CONFIG, medusa_tensors()), "org/heads")
    assert files is not None
    for shape in ({"hidden": 48}, {"vocabulary": 128}):
        with pytest.raises(DraftError, match=r"org/heads is for .* trained for this target") as caught:
            opened(files, target_shape(**shape))
        assert str(next(iter(shape.values()))) in str(caught.value)
    padded = write_head(tmp_path / "padded", None, medusa_tensors(hidden=4, rows=32_000), "heads.pt")
    files = open_files(padded, "heads")
    assert files is not None
    for vocabulary in (32_064, 31_990):
        assert opened(files, target_shape(hidden=4, vocabulary=vocabulary)).tokens is None


def test_weights_that_are_not_finite(tmp_path: Path, parts: TargetParts) -> None:
    tensors = medusa_tensors()
    tensors["1.0.linear.weight"][3, 3] = torch.nan
    head = open_medusa(write_head(tmp_path, MEDUSA_CONFIG, tensors))
    with pytest.raises(CheckpointError, match=r"'1\.0\.linear\.weight' has values that are not finite"):
        head.load(parts, 8)
