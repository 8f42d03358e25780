"""Hub repositories that hold only a head: a configuration, and weights that are pickles perhaps."""

from pathlib import Path

import pytest

from tests.checkpoint.hub_standin import COMMIT, StandIn
from tests.checkpoint.hub_visitor import Visitor

# Takes all pickles of a repository whose config.json says "heads".
VISIT = """
import json, sys
from offspec.checkpoint.hub import download_head
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress
def choose(names, load):
    if "config.json" not in names or "heads" not in load("config.json"):
        return []
    return load("config.json").get("files") or sorted(name for name in names if name.endswith(".pt"))
exec(sys.argv[2])
events, said = [], {}
try:
    found = download_head(sys.argv[1], None, events.append, choose)
    if found is not None:
        said["folder"] = str(found)
        said["files"] = sorted(path.name for path in found.iterdir())
except OffspecError as error:
    said["error"] = type(error).__name__
    said["text"] = str(error)
said["progress"] = [(e.stage, e.done, e.total, e.unit) for e in events if isinstance(e, LoadProgress)]
said["notices"] = [e.text for e in events if not isinstance(e, LoadProgress)]
print(json.dumps(said))
"""
HEADS = {
    "config.json": b'{"heads": 3}',
    "first.pt": b"a" * 9000,
    "second.pt": b"b" * 500,
    "README.md": b"# words",
    "tokenizer.json": b"{}",
}
NEEDED = ["config.json", "first.pt", "second.pt"]
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def hub(server: StandIn) -> StandIn:
    model = {"config.json": b'{"model_type": "llama"}', "first.pt": b"a"}
    server.repositories = {"org/heads": dict(HEADS), "org/model": model}
    return server


@pytest.fixture
def visit(hub: StandIn, tmp_path: Path) -> Visitor:
    return Visitor(hub, tmp_path, VISIT)


@pytest.mark.exhaustive
def test_a_head_is_fetched_once(hub: StandIn, visit: Visitor) -> None:
    said = visit("org/heads")
    assert said.files == NEEDED and said.folder.endswith(COMMIT)
    assert sorted(hub.downloads()) == NEEDED
    total = sum(len(HEADS[name]) for name in NEEDED[1:])
    assert said.progress[-1] == ["downloading org/heads", total, total, "bytes"]
    assert visit("org/heads").folder == said.folder
    assert hub.downloads() == []
    offline = visit("org/heads", HF_HUB_OFFLINE="1")
    assert (offline.folder, offline.notices, hub.log) == (said.folder, [], [])
    unplugged = visit("org/heads", HF_ENDPOINT=NOWHERE)
    assert unplugged.folder == said.folder and "cannot be reached" in unplugged.notices[0]


def test_a_part_of_a_copy_is_none(visit: Visitor) -> None:
    folder = Path(visit("org/heads").folder)
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes(b'{"heads": 3, "files": ["third.pt"]}')
    said = visit("org/heads", HF_HUB_OFFLINE="1")
    assert said.error == "ModelNotFoundError" and "not whole" in said.text


def test_of_a_model_only_the_configuration_is_fetched(hub: StandIn, visit: Visitor) -> None:
    said = visit("org/model")
    assert (said.folder, said.error, said.notices) == ("", "", [])
    assert hub.downloads() == ["config.json"]
    assert visit("org/model", HF_HUB_OFFLINE="1").error == "ModelNotFoundError"  # that is no copy


def test_a_file_that_is_listed_and_absent(hub: StandIn, visit: Visitor) -> None:
    hub.repositories["org/heads"]["config.json"] = b'{"heads": 3, "files": ["third.pt"]}'
    said = visit("org/heads")
    assert said.error == "CheckpointError" and "lacks third.pt" in said.text
    assert visit("org/absent").error == "ModelNotFoundError"
