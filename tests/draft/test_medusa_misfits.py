"""Medusa heads that are incomplete, damaged, or of another target."""

from pathlib import Path
from typing import cast

import pytest
import torch

from offspec.core.errors import CheckpointError, DraftError, MissingTensorError
from offspec.draft.heads.files import open_files
from offspec.draft.heads.medusa import opened
from offspec.model.parts import TargetParts
from tests.support.heads_files import MEDUSA_CONFIG, medusa_tensors, open_for_tiny, target_shape, write_head

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


def test_heads_that_are_there_twice(tmp_path: Path) -> None:
    tensors = {**medusa_tensors(), "medusa_head.0.0.linear.weight": torch.zeros(32, 32)}
    with pytest.raises(DraftError, match=r"twice, as '.*0\.0\.linear\.weight' and"):
        open_for_tiny(write_head(tmp_path, MEDUSA_CONFIG, tensors))


def test_a_configuration_without_heads(tmp_path: Path) -> None:
    folder = write_head(tmp_path, MEDUSA_CONFIG, {"model.norm.weight": torch.zeros(4)})
    with pytest.raises(MissingTensorError, match="no tensor of one"):
        open_for_tiny(folder)


@pytest.mark.parametrize("shape", [{"hidden": 48}, {"vocabulary": 128}])
def test_heads_of_another_target(tmp_path: Path, shape: dict[str, int]) -> None:
    files = open_files(write_head(tmp_path, MEDUSA_CONFIG, medusa_tensors()), "org/heads")
    assert files is not None
    with pytest.raises(DraftError, match=r"org/heads is for .* trained for this target") as caught:
        opened(files, target_shape(**shape))
    assert str(next(iter(shape.values()))) in str(caught.value)


def test_a_vocabulary_with_another_padding_fits(tmp_path: Path) -> None:
    tensors = medusa_tensors(hidden=4, rows=32_000)
    files = open_files(write_head(tmp_path, None, tensors, "medusa_lm_head.pt"), "heads")
    assert files is not None
    assert opened(files, target_shape(hidden=4, vocabulary=32_064)).tokens is None
    assert opened(files, target_shape(hidden=4, vocabulary=31_990)).tokens is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    tensors = medusa_tensors()
    tensors["1.0.linear.weight"][3, 3] = value
    head = open_for_tiny(write_head(tmp_path, MEDUSA_CONFIG, tensors))
    assert head is not None
    with pytest.raises(CheckpointError, match=r"'1\.0\.linear\.weight' has values that are not finite"):
        head.load(cast(TargetParts, target_shape()), 8)
