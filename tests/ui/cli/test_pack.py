"""`offspec pack`: a folder or JSON on stdout, everything else on stderr; and `--quantize`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from offspec.checkpoint.checksum import FileChecksum
from offspec.checkpoint.pack_manifest import Manifest, Origin, PackedFile
from offspec.core.errors import DiskFullError
from offspec.core.events import LoadProgress, Notice
from offspec.model.quantize import pack as quantizer

Call = Callable[..., Result]
ORIGIN = Origin("some/model", "f" * 64, "nf4")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the command; nothing is packed. kept: existing files; failure: the error to raise."""
    recorded: dict[str, Any] = {}

    def pack_model(
        model: str, to: str, *, notify: Callable[[object], None], **given: Any
    ) -> quantizer.PackResult:
        kept, failure = recorded.pop("kept", 0), recorded.pop("failure", None)
        recorded.update(model=model, to=to, **given)
        notify(Notice(f"packing [{model}]"))
        notify(LoadProgress("packing", 0, 10, "bytes", "layer 1 of 4"))
        if failure is not None:
            raise failure
        return quantizer.PackResult(Path("/some/place"), ORIGIN, 8_000_000_000, 2_000_000_000, 5, kept, 3.25)

    def verify_pack(folder: Path, notify: Callable[[object], None]) -> Manifest:
        recorded["verified"] = folder
        if "failure" in recorded:
            raise recorded["failure"]
        return Manifest(
            ORIGIN, {f"{i}.safetensors": PackedFile(FileChecksum(100, 0, 0, ""), {}) for i in range(3)}
        )

    monkeypatch.setattr(quantizer, "pack_model", pack_model)
    monkeypatch.setattr(quantizer, "verify_pack", verify_pack)
    monkeypatch.setattr("offspec.ui.cli.pack.check_pack", lambda folder: None)
    return recorded


def test_folder_goes_to_stdout(offspec: Call, recorded: dict[str, Any]) -> None:
    recorded["kept"] = 5
    assert "already exists: 5 files, 2.00 GB" in offspec("pack", "some/model", "--to", "nf4").stderr
    result = offspec("pack", "some/model", "--to", "nf4")
    assert result.exit_code == 0
    assert result.stdout == "/some/place\n"
    assert result.stderr == "packing [some/model]\n8.00 GB became 2.00 GB in 5 files, in 3.2 s\n"
    assert recorded == {"model": "some/model", "to": "nf4", "out": None, "memory": None, "twice": False}


def test_options_are_passed_on(offspec: Call, recorded: dict[str, Any], tmp_path: Path) -> None:
    options = ("--out", str(tmp_path), "--memory", "2GB", "--again", "--quiet", "--json")
    result = offspec("pack", "some/m", "--to", "int4-g64", *options)
    given = {"out": tmp_path, "memory": 2_000_000_000, "twice": True}
    assert recorded == {"model": "some/m", "to": "int4-g64", **given}
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        **{"folder": "/some/place", "model": "some/model", "format": "nf4", "files": 5, "kept": 0},
        **{"bytes": 2_000_000_000, "source_bytes": 8_000_000_000, "seconds": 3.25},
    }


def test_verify(offspec: Call, recorded: dict[str, Any]) -> None:
    result = offspec("pack", "--verify", "some/folder", "--json")
    assert recorded == {"verified": Path("some/folder")}
    assert json.loads(result.stdout)["files"] == 3 and json.loads(result.stdout)["bytes"] == 300
    assert result.stderr == "3 files match their checksums\n"


@pytest.mark.parametrize("args", [("some/m", "--to", "nf4"), ("--verify", "m")])
def test_errors_are_one_line(offspec: Call, recorded: dict[str, Any], args: tuple[str, ...]) -> None:
    for failure, code, message in (
        (DiskFullError("no room"), 1, "error: no room\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ):
        recorded["failure"] = failure
        result = offspec("pack", *args, "--quiet")
        assert (result.exit_code, result.stdout, result.stderr) == (code, "", message)
