"""MLPSpeculators, tied and untied: the same guesses as the published formula, written naively."""

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from offspec.core.errors import CheckpointError, DraftError, MissingTensorError
from offspec.core.events import unheard
from offspec.draft.base import Features, Wants
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.draft.heads.mlp_speculator import OpenedMLP, recognises
from offspec.draft.heads.open import open_head
from offspec.model.parts import TargetParts
from tests.draft.asking import CALLS, CHAINS, Hearing, ask, paths, tree_below
from tests.support.heads_files import (
    HIDDEN,
    INNER,
    MLP_CONFIG,
    Tensors,
    mlp_config,
    mlp_tensors,
    target_shape,
    write_head,
    write_hollow,
)

IDS = [5, 9, 17, 33, 64]
ROOT = len(IDS) - 1
# All that such a head asks of its target.
PARTS = cast(TargetParts, target_shape())


def states(count: int, start: int = 0) -> Features:
    torch.manual_seed(count)
    return Features(start, 3 * torch.randn(count, HIDDEN), {})


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean() + 1e-6)


def naive(tensors: Tensors, config: dict[str, Any], hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The published formula along one path, the root first: logits [V] at its end."""
    stages, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / stages)
    token_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
    state = norm(hidden) / 2**0.5 if config["scale_input"] else hidden
    for depth, token in enumerate(tokens):
        i, projection = (0, min(depth, 1)) if config["tie_weights"] else (depth, depth)
        z = tensors[f"speculator.proj.{projection}.weight"] @ state
        z = z + token_weight / state_weight * tensors[f"speculator.emb.{i}.weight"][token]
        z = norm(z) * tensors[f"speculator.ln.{i}.weight"] + tensors[f"speculator.ln.{i}.bias"]
        state = 0.5 * z * (1 + torch.erf(z / 2**0.5))
    return tensors[f"speculator.head.{i}.weight"] @ state


def open_mlp(folder: Path) -> OpenedMLP:
    head = open_head(str(folder), target_shape(), unheard)
    assert isinstance(head, OpenedMLP)
    return head


@pytest.mark.parametrize(
    ("tied", "scale_input", "prefix", "calls"),
    [
        (False, False, "speculator.", CALLS),
        (False, True, "", CHAINS),
        (True, False, "", CALLS),
        (True, True, "speculator.", CHAINS),
    ],
    ids=["plain", "scaled", "tied", "tied and scaled"],
)
def test_it_guesses_by_the_formula(
    tmp_path: Path, tied: bool, scale_input: bool, prefix: str, calls: Any
) -> None:
    tensors, config = mlp_tensors(tied), mlp_config(tied, scale_input)
    stored = {prefix + name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    head = open_mlp(write_head(tmp_path, config, stored))
    assert (head.kind, head.name) == ("mlp_speculator", "mlp_speculator (4 heads)")
    assert (head.wants, head.shares_head) == (Wants(last=True), False)
    assert head.nbytes(999) == 4 * sum(tensor.numel() for tensor in tensors.values())
    drafter, features = head.load(PARTS, 64), states(ROOT)
    drafter.observe(features)
    guessed = ask(drafter, IDS, calls)
    for logits, path in zip(guessed, paths(), strict=True):
        expected = naive(tensors, config, features.last[-1], [IDS[-1], *path])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_an_inner_size_of_zero_is_the_targets(tmp_path: Path) -> None:
    tensors, config = mlp_tensors(inner=HIDDEN), mlp_config(inner_dim=0)
    drafter = open_mlp(write_head(tmp_path, config, tensors)).load(PARTS, 8)
    features = states(ROOT)
    drafter.observe(features)
    expected = naive(tensors, config, features.last[-1], [IDS[-1]])
    torch.testing.assert_close(ask(drafter, IDS)[0], expected, rtol=1e-4, atol=1e-4)


def test_below_the_last_head_nothing_is_guessed(tmp_path: Path) -> None:
    drafter = open_mlp(write_head(tmp_path, mlp_config(stages=2), mlp_tensors(stages=2))).load(PARTS, 8)
    drafter.observe(states(ROOT))
    drafter.start(IDS)
    hearing = Hearing()
    children = drafter.expand(tree_below(IDS[-1]), [0, 1, 3], hearing)
    assert len(hearing.heard) == 2
    assert (children.log_prob[:2, 0] > -30).all()
    assert (children.log_prob[2] == -torch.inf).all()
    assert drafter.expand(tree_below(IDS[-1]), [4], hearing).token.shape == (1, 0)


def test_a_tree_of_its_own_every_time(tmp_path: Path) -> None:
    """What a tree before this one held at the same nodes does not count."""
    drafter = open_mlp(write_head(tmp_path, mlp_config(), mlp_tensors())).load(PARTS, 8)
    drafter.start(IDS)
    assert drafter.expand(tree_below(IDS[-1]), [0, 1], Hearing()).token.shape == (2, 0), "no state is known"
    drafter.observe(states(ROOT))
    first = ask(drafter, IDS)
    drafter.commit([0, 1])
    drafter.observe(states(2, ROOT))
    second = ask(drafter, [*IDS, 7, 30])
    assert not torch.isclose(first[0], second[0]).all()
    drafter.rewind(ROOT)
    drafter.observe(states(ROOT))
    assert torch.equal(ask(drafter, IDS), first)


def test_tokens_beyond_its_vocabulary_are_taken_for_its_last(tmp_path: Path) -> None:
    config = mlp_config(tied=True, vocab_size=4000)
    files = write_head(tmp_path, config, mlp_tensors(True, rows=4000))
    head = open_head(str(files), target_shape(vocabulary=4032), unheard)
    assert head is not None
    drafter = head.load(cast(TargetParts, target_shape(vocabulary=4032)), 8)
    drafter.observe(states(1))
    candidates = GrowingTree(4031)
    candidates.graft(0, Subtree([-1], [4000], [-1.0]), source=0)
    drafter.start([4, 4031])
    hearing = Hearing()
    drafter.expand(candidates, [0, 1], hearing)
    assert torch.stack(hearing.heard).shape == (2, 4000)


def test_the_published_head_opens(tmp_path: Path) -> None:
    """By its configuration and shapes; its authors call it one of 3.2 billion numbers."""
    sizes = {"emb": (128256, 3072), "head": (128256, 3072), "ln": (3072,)}
    shapes = {
        name: sizes.get(name.split(".")[1], (3072, 4096 if ".0." in name else 3072)) for name in mlp_tensors()
    }
    folder = write_hollow(tmp_path, MLP_CONFIG, shapes)
    head = open_head(str(folder), target_shape(4096, 128256), unheard)
    assert head is not None and head.name == "mlp_speculator (4 heads)"
    assert round(head.nbytes(0) / 4e9, 1) == 3.2


def test_without_a_configuration_the_tensors_tell(tmp_path: Path) -> None:
    for tied, stages in ((False, 4), (True, 1)):
        folder = write_head(tmp_path / str(tied), None, mlp_tensors(tied), "head.bin")
        assert len(open_mlp(folder).stages) == stages
    assert recognises(MLP_CONFIG, [])
    assert not recognises({"model_type": "llama"}, ["model.embed_tokens.weight"])


BROKEN: dict[str, tuple[dict[str, torch.Tensor | None], type[Exception], str]] = {
    "a missing part": ({"head.2.weight": None}, MissingTensorError, r"lacks the tensor 'speculator\.head\.2"),
    "a missing norm": ({"ln.3.bias": None}, MissingTensorError, r"speculator\.ln\.3\.bias"),
    "another inner size": (
        {"proj.1.weight": torch.zeros(INNER, 8)},
        DraftError,
        r"\[24, 8\] and not \[24, 24\]",
    ),
    "another width": ({"proj.0.weight": torch.zeros(INNER, 48)}, DraftError, "hidden states of 48 numbers"),
    "another vocabulary": ({"head.0.weight": torch.zeros(99, INNER)}, DraftError, "vocabulary of 99 tokens"),
    "no matrix": ({"proj.0.weight": torch.tensor(1.0)}, DraftError, "no matrix"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_heads_with_a_part_missing_or_wrong(tmp_path: Path, name: str) -> None:
    change, error, words = BROKEN[name]
    every = {**mlp_tensors(), **{f"speculator.{key}": value for key, value in change.items()}}
    tensors = {key: value for key, value in every.items() if value is not None}
    with pytest.raises(error, match=words) as caught:
        open_mlp(write_head(tmp_path, mlp_config(), tensors))
    assert "\n" not in str(caught.value)


def test_a_number_of_heads_that_is_none(tmp_path: Path) -> None:
    for count in (0, 10**9, "4", True):
        with pytest.raises(DraftError, match="no number of heads"):
            open_mlp(write_head(tmp_path, mlp_config(n_predict=count), mlp_tensors()))


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    tensors = mlp_tensors()
    tensors["speculator.ln.2.bias"][0] = torch.nan
    head = open_mlp(write_head(tmp_path, mlp_config(), tensors))
    with pytest.raises(CheckpointError, match="not finite"):
        head.load(PARTS, 8)
