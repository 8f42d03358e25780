"""GGUF files of Hub repositories, with a fake Hub on the loopback address."""

from pathlib import Path

import gguf
import pytest
from transformers import PreTrainedModel

from tests.checkpoint.hub_visitor import NOWHERE, Visitor
from tests.support.fake_hub import COMMIT, FakeHub
from tests.support.gguf_files import UnpackEnvironment, split_gguf, write_gguf

VISIT = """
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.hub import is_reachable
from offspec.checkpoint.open import resolve_model
def visit(name, events, said):
    if name == "reachable":
        said["text"] = str(is_reachable())
    elif name.startswith("open "):
        found = open_checkpoint(name.removeprefix("open "), notify=events.append, cache_dir=Path("CACHE"))
        said["tensors"] = dict.fromkeys(found.tensors, "")
    else:
        said["folder"] = str(resolve_model(name, events.append))
"""
NAME = "org/Tiny-GGUF"
Q8, F16 = "Tiny-Q8_0.gguf", "Tiny-F16.gguf"


@pytest.fixture(scope="module")
def files(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in 8 bits, and a split one in 16 bits in a separate folder."""
    folder = tmp_path_factory.mktemp("ggufs")
    write_gguf(folder / Q8, llama, "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    write_gguf(folder / F16, llama, "llama", kind=gguf.GGMLQuantizationType.F16)
    parts = {
        f"F16/{file.name.replace('tiny', 'Tiny-F16')}": file.read_bytes()
        for file in split_gguf(folder / F16, folder / "parts")
    }
    return {"README.md": b"# words", "mmproj-F16.gguf": b"GGUF", Q8: (folder / Q8).read_bytes(), **parts}


@pytest.fixture
def hub(server: FakeHub, files: dict[str, bytes]) -> FakeHub:
    server.begin({NAME: dict(files)})
    return server


@pytest.fixture
def visit(hub: FakeHub, bench: UnpackEnvironment, tmp_path: Path) -> Visitor:
    return Visitor(hub, tmp_path, VISIT.replace("CACHE", str(bench.cache)))


def test_named_file_is_downloaded_once(hub: FakeHub, visit: Visitor) -> None:
    said = visit(f"hf.co/{NAME}:q8_0")
    assert said.folder.endswith(f"{COMMIT}/{Q8}"), said
    assert hub.downloads() == [Q8]
    size = len(hub.repositories[NAME][Q8])
    assert said.progress[-1] == [f"downloading {NAME}", size, size, "bytes"]
    assert visit(f"{hub.url}/{NAME}/resolve/main/{Q8}?download=true").folder == said.folder
    assert hub.downloads() == []
    named, only, absent = visit.all(f"{NAME}:Q8_0", NAME, f"{NAME}:F16", HF_HUB_OFFLINE="1")
    assert said.folder == named.folder == only.folder, "the only one that is here"
    assert absent.error == "ModelNotFoundError"
    assert (
        "HF_HUB_OFFLINE is set, and in the Hugging Face cache" in absent.text and "it has Q8_0" in absent.text
    )


@pytest.mark.exhaustive
def test_split_file_is_downloaded_and_opened(hub: FakeHub, visit: Visitor) -> None:
    first, second, third = sorted(name for name in hub.repositories[NAME] if name.startswith("F16/"))
    said, here = visit.all(f"open {NAME}:F16", f"{NAME}:F16")
    assert "model.embed_tokens.weight" in said.tensors, said
    assert hub.downloads() == [Path(name).name for name in (first, second, third)]
    assert here.folder.endswith(first)
    (Path(here.folder).parent / Path(second).name).unlink()
    assert "is incomplete" in visit(f"{NAME}:F16", HF_HUB_OFFLINE="1").text


def test_selection_of_a_file(hub: FakeHub, visit: Visitor) -> None:
    files = hub.repositories[NAME]
    gone = sorted(name for name in files if name.startswith("F16/"))[1]
    hub.repositories |= {
        "org/one": {name: files[name] for name in ("README.md", Q8)},
        "org/both": {"model.safetensors": b"", **files},
        "org/part": {name: data for name, data in files.items() if name != gone},
    }
    several, other, lacking, both = visit.all(NAME, f"{NAME}:Q4_K_M", "org/part:F16", "org/both")
    assert several.error == "ModelNotFoundError"
    assert f"{NAME} has 2 GGUF models: name one, as in {NAME}:" in several.text
    assert all(part in several.text for part in ("Q8_0 (", "F16 (", "KB)")) and "it has" in other.text
    assert lacking.error == "CheckpointError" and f"lacks {gone}" in lacking.text
    assert "no config.json" in both.text, "safetensors go before GGUF files, unless one is named"
    assert hub.downloads() == [], "none is fetched"
    assert all(said.folder.endswith(Q8) for said in visit.all("org/one", "org/both:Q8_0"))


def test_unreachable_hub_is_detected_within_seconds(visit: Visitor) -> None:
    assert visit("reachable").text == "True"
    assert visit("reachable", HF_ENDPOINT=NOWHERE).text == "False"
    assert visit("reachable", HF_HUB_OFFLINE="1").text == "False"
