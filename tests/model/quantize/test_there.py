"""Packs that are there already: checked, mended, verified; and what is refused."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offspec.core.config import EngineConfig, PackFormat
from offspec.core.errors import (
    CapacityError,
    CheckpointError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from offspec.model.quantize.pack import pack_model, packed_model, verify_pack
from tests.model.quantize.stage import FORMATS, Bench, flip
from tests.support.tiny_models import write_model

LAST = "model-layer-0002.safetensors"


def test_a_pack_that_is_there_is_checked_and_not_made_again(bench: Bench) -> None:
    bench.pack()
    stamps = {file.name: file.stat().st_mtime_ns for file in bench.out.iterdir()}
    again = bench.pack()
    assert again.kept == again.files == 4
    assert {file.name: file.stat().st_mtime_ns for file in bench.out.iterdir()} == stamps


@pytest.mark.parametrize("place", [-1, 5000, 20])
def test_a_flipped_byte_is_found_and_mended(bench: Bench, place: int) -> None:
    bench.pack()
    before = bench.content()
    flip(bench.out / LAST, place)
    with pytest.raises(CheckpointError, match=rf"{LAST} is damaged: .* run `offspec pack .* again") as caught:
        verify_pack(bench.out, bench.events.append)
    assert "\n" not in str(caught.value)
    if place != 20:  # a letter of the header, which `verify_pack` alone looks at
        assert bench.pack().kept == 3
        assert bench.content() == before


def test_a_damaged_pack_of_the_cache_is_made_again_on_use(bench: Bench, tmp_path: Path) -> None:
    def use() -> None:
        bench.events.clear()
        opened = packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path)
        assert opened.name == str(bench.model) and opened.folder.parent == tmp_path / "packed"

    use()
    (pack,) = (tmp_path / "packed").glob("tiny-nf4-*")
    use()
    assert not bench.said
    for spoil in (Path.unlink, lambda file: os.truncate(file, 5000)):
        spoil(pack / LAST)
        use()
        assert "was damaged" in bench.said
    (pack / "config.json").unlink()
    use()
    assert "was damaged" in bench.said


def test_what_is_missing_is_made_again(bench: Bench) -> None:
    bench.pack()
    before = bench.content()
    for name in (LAST, "config.json", "tokenizer.json"):
        (bench.out / name).unlink()
    assert bench.pack().kept == 3
    assert bench.content() == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_text_that_is_another_is_found_and_mended(bench: Bench, name: str) -> None:
    bench.pack()
    before = bench.content()
    (bench.out / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{name} has .* run `offspec pack .* again"):
        verify_pack(bench.out, bench.events.append)
    assert bench.pack().kept == 4
    assert bench.content() == before
    verify_pack(bench.out, bench.events.append)


def test_verifying_counts_the_files_that_are_wrong(bench: Bench) -> None:
    bench.pack()
    flip(bench.out / LAST)
    (bench.out / "model-rest.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rest\.safetensors is missing, and 1 more of its 10 files"):
        verify_pack(bench.out, bench.events.append)


def test_verifying_what_is_no_pack(bench: Bench) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        verify_pack(bench.out, bench.events.append)
    with pytest.raises(ModelNotFoundError, match="is no pack"):
        verify_pack(bench.model, bench.events.append)


def test_a_folder_that_is_something_else(bench: Bench) -> None:
    bench.out.mkdir()
    assert bench.pack().kept == 0  # an empty one is as good as none
    with pytest.raises(RequestError, match=r"holds a pack of .* in nf4"):
        bench.pack("int8")
    with pytest.raises(RequestError, match="exists and is no pack"):
        bench.pack(out=bench.model)


def test_a_format_that_is_none() -> None:
    with pytest.raises(RequestError, match=r"quantize must be one of nf4, .* not 'nf3'"):
        EngineConfig("model", quantize="nf3")


def test_a_pack_is_no_source(bench: Bench, tmp_path: Path) -> None:
    bench.pack()
    with pytest.raises(UnsupportedModelError, match="is quantised already"):
        pack_model(str(bench.out), "int8", out=tmp_path / "twice")


def test_a_model_with_nothing_to_round(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no matrix of its layers"):
        pack_model(str(write_model(tmp_path / "narrow")), "nf4", out=tmp_path / "pack")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("value", "why"), [(float("nan"), "no numbers"), (1e6, "cannot be packed")])
def test_values_that_no_scale_can_hold(
    bench: Bench, tmp_path: Path, to: PackFormat, value: float, why: str
) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "copy"))
    tensors = load_file(bench.model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = value
    save_file(tensors, bench.model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=why):
        bench.pack(to)


def test_memory_that_is_too_little(bench: Bench) -> None:
    with pytest.raises(CapacityError, match="`memory`") as caught:
        bench.pack(memory=1_000_000)
    assert bench.pack(memory=caught.value.needed + 50_000_000).files == 4


def test_a_place_that_cannot_be_written(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="name another folder by `out`"):
        bench.pack(out=tmp_path / "file" / "pack")
