"""Everything that affects the rounding of a pass is part of the numerics fingerprint."""

import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch

import offspec_kernels
from offspec.model.numerics_fingerprint import digest_of, numerics_fingerprint


def test_the_fingerprint_is_stable() -> None:
    assert numerics_fingerprint() == numerics_fingerprint()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("ONEDNN_MAX_CPU_ISA", "AVX2"), ("MKL_CBWR", "COMPATIBLE"), ("OFFSPEC_KERNELS", "reference")],
)
def test_library_settings_change_it(setting: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(setting, raising=False)
    before = numerics_fingerprint()
    monkeypatch.setenv(setting, value)
    assert numerics_fingerprint() != before


def test_library_versions_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = numerics_fingerprint(), metadata.version
    assert torch.__version__.partition("+")[0] in torch.__config__.show()
    for package in ("offspec", "transformers", "numba"):
        monkeypatch.setattr(
            metadata, "version", lambda name, of=package: "0" if name == of else version(name)
        )
        assert numerics_fingerprint() != before
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(torch.__config__, "show", lambda: "another build")
    assert numerics_fingerprint() != before


def test_code_changes_it(tmp_path: Path) -> None:
    """A changed byte of a kernel, an additional file, a renamed file."""
    folders = [tmp_path / name for name in ("as it is", "byte", "more", "renamed")]
    for folder in folders:
        shutil.copytree(Path(offspec_kernels.__file__).parent, folder)
    _, byte, more, renamed = folders
    kernel = byte / "row_linear" / "blocks.py"
    kernel.write_bytes(kernel.read_bytes().replace(b"_ROWS = 64", b"_ROWS = 32"))
    (more / "row_linear" / "another.py").touch()
    (renamed / "transfer.py").rename(renamed / "transfers.py")
    assert len({digest_of((folder,)) for folder in folders}) == 4
