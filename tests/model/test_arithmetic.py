"""Whatever decides how a pass rounds is part of the identity of its arithmetic."""

import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

import offspec_kernels
from offspec.model.arithmetic import arithmetic, digest_of


def test_it_stays_the_same() -> None:
    assert arithmetic() == arithmetic()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("ONEDNN_MAX_CPU_ISA", "AVX2"), ("MKL_CBWR", "COMPATIBLE"), ("OFFSPEC_KERNELS", "reference")],
)
def test_settings_of_libraries(setting: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(setting, raising=False)
    before = arithmetic()
    monkeypatch.setenv(setting, value)
    assert arithmetic() != before


def test_versions_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = arithmetic(), metadata.version
    assert torch.__version__.partition("+")[0] in torch.__config__.show()
    for package in ("offspec", "transformers", "numba"):
        monkeypatch.setattr(
            metadata, "version", lambda name, of=package: "0" if name == of else version(name)
        )
        assert arithmetic() != before
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.__config__, "show", lambda: "another build")
    assert arithmetic() != before


def test_code(tmp_path: Path) -> None:
    """A byte of a kernel, a file more, a file of another name."""
    folders = [tmp_path / name for name in ("as it is", "byte", "more", "renamed")]
    for folder in folders:
        shutil.copytree(Path(offspec_kernels.__file__).parent, folder)
    _, byte, more, renamed = folders
    kernel = byte / "row_linear" / "blocks.py"
    kernel.write_bytes(kernel.read_bytes().replace(b"_ROWS = 64", b"_ROWS = 32"))
    (more / "row_linear" / "another.py").touch()
    (renamed / "transfer.py").rename(renamed / "transfers.py")
    assert len({digest_of((folder,)) for folder in folders}) == 4
