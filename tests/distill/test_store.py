"""Text on disk: complete batches are reused; an error names the fix."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec.core.errors import DiskFullError
from offspec.core.events import Event, Notice
from offspec.distill.generate_batch import GeneratedText
from offspec.distill.store import Store, text_folder
from offspec.distill.student import read_training_batch

CPU = torch.device("cpu")


def passage(length: int, prompt: int, seed: int = 0) -> GeneratedText:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 90, (length,), generator=random)
    return GeneratedText(tokens, prompt, torch.randn(length, 8, generator=random).to(torch.bfloat16))


def filled(folder: Path, batches: int = 2) -> tuple[Store, list[GeneratedText]]:
    store, written = Store(folder, 8, 2), []
    for batch in range(batches):
        passages = [passage(9, 4, 2 * batch), passage(6, 2, 2 * batch + 1)]
        store.add(passages)
        written += passages
    return store, written


def test_passages_come_back(tmp_path: Path) -> None:
    store, written = filled(tmp_path)
    for again in (store, Store(tmp_path, 8, 2)):
        assert (again.batches, again.passages, again.rows, again.tokens) == (2, 4, 30, 18)
        for number, one in enumerate(written):
            read = again.read(number)
            assert (read.prompt, again.length(number)) == (one.prompt, len(one))
            assert torch.equal(read.tokens, one.tokens)
            assert torch.equal(read.states, one.states)
        assert [text.tolist() for text in again.answers([1])] == [written[1].tokens[2:].tolist()]


def test_a_damaged_batch_and_later_ones_are_made_again(tmp_path: Path) -> None:
    _, written = filled(tmp_path, 3)
    file = tmp_path / "text-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    store = Store(tmp_path, 8, 2)
    assert store.batches == 1
    store.add(written[2:4])
    assert [store.read(number).prompt for number in range(4)] == [4, 2, 4, 2]
    assert Store(tmp_path, 8, 2).batches == 3  # the last one was whole


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: tensors.pop("prompt"),
        lambda tensors: tensors.update(tokens=tensors["tokens"][:-1].clone()),
        lambda tensors: tensors.update(states=tensors["states"][:, :4].clone()),
        lambda tensors: tensors.update(prompt=-tensors["prompt"]),
        lambda tensors: tensors.update(length=tensors["length"][:1].clone()),
        lambda tensors: tensors.update(tokens=-1 - tensors["tokens"]),
    ],
)
def test_a_file_of_other_tensors_is_made_again(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    """A valid header with unexpected tensors counts as damage."""
    filled(tmp_path)
    file, heard = tmp_path / "text-00001.safetensors", list[Event]()
    tensors = load_file(file)
    spoil(tensors)
    file.unlink()
    save_file(tensors, file)
    assert Store(tmp_path, 8, 2, heard.append).batches == 1
    assert not file.exists()
    assert [event.text for event in heard if isinstance(event, Notice)] == [
        f"{file} is damaged and will be rebuilt"
    ]


def test_damaged_taps_are_made_again(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    for file in store.without_taps([0, 2]):
        store.add_taps(file, [0, 2], torch.zeros(2, 15, 8, dtype=torch.bfloat16))
    path, heard = next(iter(tmp_path.glob("taps-0-2-00001*"))), list[Event]()
    save_file({"tap.0": torch.zeros(15, 8, dtype=torch.bfloat16)}, path)
    assert Store(tmp_path, 8, 2, heard.append).without_taps([0, 2]) == [1]
    assert len(heard) == 1


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".text-00000.safetensors.1-ab.partial"
    left.touch()
    assert Store(tmp_path, 8, 2).batches == 0
    assert not left.exists()


def test_one_text_in_twenty_is_held_out(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, 25)
    assert store.held_out() == [19, 39]
    assert sorted(store.training() + store.held_out()) == list(range(50))


def test_space_is_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 8, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1, 1, 20 << 20))
    store.require(10)
    with pytest.raises(DiskFullError, match=r"the text .* needs .* OFFSPEC_CACHE"):
        store.require(1_000_000)


def test_other_texts_have_other_places(tmp_path: Path) -> None:
    sources = [
        text_folder(tmp_path, target, questions, length, "bfloat16")
        for target in "ab"
        for questions in "cd"
        for length in (10, 20)
    ]
    assert len(set(sources)) == len(sources)
    assert text_folder(tmp_path, "a", "c", 10, "bfloat16") == sources[0]


def test_rows_of_a_training_batch(tmp_path: Path) -> None:
    store, written = filled(tmp_path, 1)
    batch = read_training_batch(store, [0, 1], CPU, whole=False)
    # The last two tokens of each question: the first prediction is made at the second to last.
    assert batch.tokens.tolist() == [*written[0].tokens[2:].tolist(), *written[1].tokens.tolist()]
    assert batch.remaining.tolist() == [6, 5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0]
    assert batch.in_answer.tolist() == [False, *[True] * 6, False, *[True] * 5]
    assert batch.rows_before(1).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert batch.rows_before(3, 1).tolist() == [0, 1, 2, 7, 8]
    whole = read_training_batch(store, [0], CPU, whole=True)
    assert len(whole) == 9
    assert whole.in_answer.tolist() == [False] * 3 + [True] * 6
