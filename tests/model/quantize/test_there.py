"""Existing packs: checks, repair and verification; and sources that cannot be packed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.core.config import PackFormat
from offspec.core.errors import CapacityError, CheckpointError, ModelNotFoundError
from offspec.model.quantize.pack import packed_model, verify_pack
from tests.model.quantize.stage import FORMATS, Bench, flip

LAST = "model-layer-0002.safetensors"


def test_an_existing_pack_is_checked_and_not_made_again(bench: Bench) -> None:
    bench.pack()
    stamps = {file.name: file.stat().st_mtime_ns for file in bench.out.iterdir()}
    again = bench.pack()
    assert again.kept == again.files == 4
    assert {file.name: file.stat().st_mtime_ns for file in bench.out.iterdir()} == stamps


def _another(file: Path) -> None:
    file.write_text("{}")


@pytest.mark.parametrize(
    ("name", "spoil", "kept", "why"),
    [
        (LAST, lambda file: flip(file, -1), 3, "is damaged: "),
        (LAST, lambda file: flip(file, 5000), 3, "is damaged: "),
        (LAST, lambda file: os.truncate(file, 5000), 3, ""),
        (LAST, Path.unlink, 3, "is missing"),
        ("config.json", _another, 4, "has "),
        ("tokenizer.json", _another, 4, "has "),
        ("tokenizer.json", Path.unlink, 4, "is missing"),
    ],
)
def test_damage_is_found_and_repaired(
    bench: Bench, name: str, spoil: Callable[[Path], None], kept: int, why: str
) -> None:
    bench.pack()
    before = bench.content()
    spoil(bench.out / name)
    with pytest.raises(CheckpointError, match=rf"{name} {why}.* run `offspec pack .* again") as caught:
        verify_pack(bench.out, bench.events.append)
    assert "\n" not in str(caught.value)
    assert bench.pack().kept == kept
    assert bench.content() == before
    verify_pack(bench.out, bench.events.append)


def test_verification_checks_headers_and_counts_damaged_files(bench: Bench) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        verify_pack(bench.out, bench.events.append)
    with pytest.raises(ModelNotFoundError, match="is not a pack"):
        verify_pack(bench.model, bench.events.append)
    bench.pack()
    flip(bench.out / LAST, 20)  # a letter of the header
    with pytest.raises(CheckpointError, match=f"{LAST} is damaged"):
        verify_pack(bench.out, bench.events.append)
    (bench.out / "model-rest.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rest\.safetensors is missing, and 1 more of its 10 files"):
        verify_pack(bench.out, bench.events.append)


def test_a_damaged_pack_of_the_cache_is_made_again_on_use(bench: Bench, tmp_path: Path) -> None:
    def use() -> Path:
        bench.events.clear()
        opened = packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path)
        assert opened.name == str(bench.model) and opened.folder.parent == tmp_path / "packed"
        return opened.folder

    pack = use()
    before = bench.content(pack)
    use()
    assert not bench.messages
    for name in (LAST, MANIFEST):
        for spoil in (Path.unlink, lambda file: os.truncate(file, file.stat().st_size // 2)):
            spoil(pack / name)
            use()
            assert bench.content(pack) == before and (
                "is damaged; its damaged files are made again" in bench.messages or name == MANIFEST
            )
    (pack / "config.json").unlink()
    use()
    assert "is damaged; its damaged files are made again" in bench.messages


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "NaN or infinite values"), (1e6, "cannot be packed")]
)
def test_values_too_large_for_a_scale(
    bench: Bench, tmp_path: Path, to: PackFormat, value: float, why: str
) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "copy"))
    tensors = load_file(bench.model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 7] = value
    save_file(tensors, bench.model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=why):
        bench.pack(to)


def test_too_little_memory(bench: Bench) -> None:
    with pytest.raises(CapacityError, match="`memory`") as caught:
        bench.pack(memory=1_000_000)
    assert bench.pack(memory=caught.value.needed + 50_000_000).files == 4
