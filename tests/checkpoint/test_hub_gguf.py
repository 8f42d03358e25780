"""GGUF files of hub repositories, against a stand-in on the loopback."""

from pathlib import Path

import gguf
import pytest
from transformers import PreTrainedModel

from tests.checkpoint.gguf_files import Bench, split_gguf, write_gguf
from tests.checkpoint.hub_standin import COMMIT, StandIn
from tests.checkpoint.hub_visitor import Visitor

VISIT = """
import json, sys
from pathlib import Path
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.hub import is_reachable
from offspec.checkpoint.open import locate
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress
events, said = [], {}
try:
    if sys.argv[2] == "open":
        found = open_checkpoint(sys.argv[1], notify=events.append, cache_dir=Path("CACHE"))
        said["tensors"] = {name: "" for name in found.tensors}
    elif sys.argv[2] == "look":
        said["text"] = str(is_reachable())
    else:
        path = locate(sys.argv[1], events.append)
        said["folder"] = str(path)
except OffspecError as error:
    said["error"] = type(error).__name__
    said["text"] = str(error)
said["progress"] = [(e.stage, e.done, e.total, e.unit) for e in events if isinstance(e, LoadProgress)]
print(json.dumps(said))
"""
NAME = "org/Tiny-GGUF"
Q8, F16 = "Tiny-Q8_0.gguf", "Tiny-F16.gguf"


@pytest.fixture(scope="module")
def files(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in 8 bits, and one in 16 that is split, in a folder of its own."""
    folder = tmp_path_factory.mktemp("ggufs")
    write_gguf(folder / Q8, llama, "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    write_gguf(folder / F16, llama, "llama", kind=gguf.GGMLQuantizationType.F16)
    parts = {
        f"F16/{file.name.replace('tiny', 'Tiny-F16')}": file.read_bytes()
        for file in split_gguf(folder / F16, folder / "parts")
    }
    return {"README.md": b"# words", "mmproj-F16.gguf": b"GGUF", Q8: (folder / Q8).read_bytes(), **parts}


@pytest.fixture
def hub(server: StandIn, files: dict[str, bytes]) -> StandIn:
    server.repositories = {NAME: dict(files)}
    for record in (server.gated, server.cut, server.dead, server.log):
        record.clear()
    return server


@pytest.fixture
def visit(hub: StandIn, bench: Bench, tmp_path: Path) -> Visitor:
    return Visitor(hub, tmp_path, VISIT.replace("CACHE", str(bench.cache)))


def test_the_one_file_that_is_named_is_fetched_once(hub: StandIn, visit: Visitor) -> None:
    said = visit(f"hf.co/{NAME}:q8_0")
    assert said.folder.endswith(f"{COMMIT}/{Q8}"), said
    assert hub.downloads() == [Q8]
    size = len(hub.repositories[NAME][Q8])
    assert said.progress[-1] == [f"downloading {NAME}", size, size, "bytes"]
    assert visit(f"{hub.url}/{NAME}/resolve/main/{Q8}?download=true").folder == said.folder
    assert hub.downloads() == []
    assert visit(f"{NAME}:Q8_0", HF_HUB_OFFLINE="1").folder == said.folder
    assert visit(NAME, HF_HUB_OFFLINE="1").folder == said.folder  # the only one that is here
    absent = visit(f"{NAME}:F16", HF_HUB_OFFLINE="1")
    assert absent.error == "ModelNotFoundError"
    assert "HF_HUB_OFFLINE is set, and in the hub's cache" in absent.text and "it has Q8_0" in absent.text


def test_a_split_file_is_fetched_whole_and_opened(hub: StandIn, visit: Visitor) -> None:
    first, second, third = sorted(name for name in hub.repositories[NAME] if name.startswith("F16/"))
    said = visit(f"{NAME}:F16", "open")
    assert "model.embed_tokens.weight" in said.tensors, said
    assert hub.downloads() == [Path(name).name for name in (first, second, third)]
    here = visit(f"{NAME}:F16", HF_HUB_OFFLINE="1").folder
    assert here.endswith(first)
    (Path(here).parent / Path(second).name).unlink()
    assert "not whole" in visit(f"{NAME}:F16", HF_HUB_OFFLINE="1").text


def test_several_files_are_listed_with_sizes_and_none_is_fetched(hub: StandIn, visit: Visitor) -> None:
    said = visit(NAME)
    assert said.error == "ModelNotFoundError"
    assert f"{NAME} has 2 GGUF models: name one, as in {NAME}:" in said.text
    assert "Q8_0 (" in said.text and "F16 (" in said.text and "KB)" in said.text
    assert "it has" in visit(f"{NAME}:Q4_K_M").text
    assert hub.downloads() == []


def test_a_repository_with_one_gguf_file_needs_no_more_than_its_name(hub: StandIn, visit: Visitor) -> None:
    hub.repositories[NAME] = {name: hub.repositories[NAME][name] for name in ("README.md", Q8)}
    assert visit(NAME).folder.endswith(Q8)


def test_safetensors_go_before_gguf_files_unless_one_is_named(hub: StandIn, visit: Visitor) -> None:
    hub.repositories[NAME]["model.safetensors"] = b""
    assert "no config.json" in visit(NAME).text
    assert visit(f"{NAME}:Q8_0").folder.endswith(Q8)


def test_a_part_that_the_repository_lacks_is_known_before_the_others_come(
    hub: StandIn, visit: Visitor
) -> None:
    gone = sorted(name for name in hub.repositories[NAME] if name.startswith("F16/"))[1]
    del hub.repositories[NAME][gone]
    said = visit(f"{NAME}:F16")
    assert said.error == "CheckpointError" and f"lacks {gone}" in said.text
    assert hub.downloads() == []


def test_whether_the_hub_answers_is_known_within_seconds(visit: Visitor) -> None:
    assert visit(NAME, "look").text == "True"
    assert visit(NAME, "look", HF_ENDPOINT="http://127.0.0.1:9").text == "False"
    assert visit(NAME, "look", HF_HUB_OFFLINE="1").text == "False"
