"""`offspec models`: the list, pull and rm, on caches of their own."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from typer.testing import CliRunner, Result

from offspec.checkpoint.open import embedded_model
from offspec.ui.cli.main import app
from tests.support.fake_hub import COMMIT, FakeHub, serve
from tests.support.sample_plans import large
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import environment

SAMPLE = large()

LISTED = """
import sys
from offspec.ui.cli.main import main
sys.argv = ["offspec", "models", *sys.argv[1:]]
try:
    main()
finally:
    print([name for name in ("torch", "transformers") if name in sys.modules], file=sys.stderr)
"""


class Caches:
    """A Hub cache and one of offspec's."""

    def __init__(self, folder: Path) -> None:
        self.hub, self.own = folder / "hf" / "hub", folder / "own"
        self.variables = {"HF_HOME": str(folder / "hf"), "OFFSPEC_CACHE": str(self.own), "COLUMNS": "80"}

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LISTED, *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment(**self.variables, **more),
            timeout=PATIENCE,
        )

    def call(self, *words: str) -> Result:
        """Run it in this process, where huggingface_hub has been imported."""
        return CliRunner().invoke(app, ["models", *words], prog_name="offspec")

    def listed(self) -> dict[str, dict[str, Any]]:
        return {model["name"]: model for model in json.loads(self.call("--json").stdout)}

    def add(self, name: str, files: dict[str, bytes]) -> Path:
        """Add a model as the Hub client stores it."""
        root = self.hub / f"models--{name.replace('/', '--')}"
        snapshot = root / "snapshots" / COMMIT
        for folder in (root / "blobs", root / "refs", snapshot):
            folder.mkdir(parents=True)
        (root / "refs" / "main").write_text(COMMIT)
        for number, (file, data) in enumerate(files.items()):
            (root / "blobs" / str(number)).write_bytes(data)
            (snapshot / file).symlink_to(root / "blobs" / str(number))
        return root


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caches:
    caches = Caches(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(caches.hub))
    for name in ("OFFSPEC_CACHE", "COLUMNS"):
        monkeypatch.setenv(name, caches.variables[name])
    return caches


MODEL = {
    "config.json": b'{"model_type": "llama", "num_hidden_layers": 4}',
    "model.safetensors": save({"weight": torch.zeros(1000, 1000)}),
}


def test_cached_models_are_listed_without_torch(caches: Caches) -> None:
    assert not {name for name, model in caches.listed().items() if model["kind"] != "built in"}
    caches.add("org/model", MODEL)
    caches.add("org/half", {"config.json": MODEL["config.json"]})
    for room in ("packed", "rounded", "unpacked"):
        folder = caches.own / room / f"model-{room}"
        folder.mkdir(parents=True)
        (folder / "layer-0000.safetensors").write_bytes(b"x" * 100)
    (caches.own / "packed" / ".unfinished.packing").mkdir()
    (caches.own / "plans").mkdir()
    (caches.own / "plans" / "one.json").write_text(SAMPLE.to_text())
    found = caches.listed()
    found.pop("demo", None)
    assert {name: model["kind"] for name, model in found.items()} == {
        "org/model": "hub",
        "org/half": "incomplete",
        "model-packed": "pack",
        "model-rounded": "draft",
        "model-unpacked": "GGUF",
    }
    model = found["org/model"]
    assert model["bytes"] == sum(map(len, MODEL.values()))
    # 0.55 GB and 2.55 layers.
    assert model["least_memory"] == 550_000_000 + int(2.55 * len(MODEL["model.safetensors"]) / 4)
    shown = caches.run()
    assert shown.stderr == "[]\n", "torch is not needed for it"
    page = shown.stdout
    assert "org/model" in page and max(map(len, page.splitlines())) <= 80


def test_gguf_files_in_the_hub_cache_are_a_model(caches: Caches) -> None:
    """The demo's file takes the same space as that file in the Hub cache."""
    caches.add("org/model-GGUF", {"README.md": b"", "model-Q8_0.gguf": embedded_model().read_bytes()})
    found = caches.listed()
    model, same = found["org/model-GGUF"], found["demo"]
    assert model["kind"] == "hub"
    assert (model["bytes"], model["least_memory"]) == (same["bytes"], same["least_memory"])


def test_saved_plan_shows_its_speed(caches: Caches) -> None:
    caches.add(SAMPLE.target, MODEL)
    (caches.own / "plans").mkdir(parents=True)
    (caches.own / "plans" / "one.json").write_text(SAMPLE.to_text())
    assert caches.listed()[SAMPLE.target]["tok_per_s"] == SAMPLE.forecast.tok_per_s
    assert (
        f"{SAMPLE.forecast.tok_per_s:.2g} tok/s in" in caches.call().stdout
    )  # 80 columns have no room for a table


def test_rm_asks_for_confirmation(caches: Caches) -> None:
    root = caches.add("org/model", MODEL)
    refused = caches.call("rm", "org/model")
    assert refused.exit_code == 2 and "without confirmation; pass --yes" in refused.stderr
    assert root.exists()
    for answer, code in (("n", 1), ("y", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        rm_run = subprocess.run(
            [sys.executable, "-c", LISTED, "rm", "org/model"],
            stdin=theirs,
            capture_output=True,
            text=True,
            env=environment(**caches.variables),
            timeout=PATIENCE,
        )
        os.close(ours)
        os.close(theirs)
        assert rm_run.returncode == code and "Remove org/model (4.00 MB, hub) from" in rm_run.stderr
    assert not root.exists()


def test_rm_of_locally_made_models(caches: Caches) -> None:
    folder = caches.own / "rounded" / "model-4bit"
    folder.mkdir(parents=True)
    removed = caches.call("rm", "model-4bit", "--yes")
    assert (removed.exit_code, removed.stdout[:18]) == (0, "removed model-4bit")
    assert not folder.exists()
    absent = caches.call("rm", "model-4bit", "--yes")
    assert absent.exit_code == 1 and "`offspec models` lists the cached models" in absent.stderr


def test_pull(caches: Caches) -> None:
    hub = FakeHub()
    with serve(hub):
        hub.repositories = {"org/model": MODEL}
        pulled = caches.run("pull", "org/model", HF_ENDPOINT=hub.url)
        assert pulled.returncode == 0, pulled.stderr
        assert Path(pulled.stdout.strip()) == caches.hub / "models--org--model" / "snapshots" / COMMIT
        assert caches.listed()["org/model"]["kind"] == "hub"
    wrong = caches.call("pull", "not an id")
    assert wrong.exit_code == 2 and "not an id is not a Hugging Face model id" in wrong.stderr
