"""Hub repositories with only a head: a configuration, and weights that may be pickles."""

from pathlib import Path

import pytest

from tests.checkpoint.hub_visitor import NOWHERE, Visitor
from tests.support.fake_hub import COMMIT, FakeHub

# Requests all pickles of a repository whose config.json says "heads".
VISIT = """
from offspec.checkpoint.hub import download_head
def choose(names, load):
    if "config.json" not in names or "heads" not in load("config.json"):
        return []
    return load("config.json").get("files") or sorted(name for name in names if name.endswith(".pt"))
def visit(name, events, said):
    found = download_head(name, None, events.append, choose)
    if found is not None:
        said["folder"] = str(found)
        said["files"] = sorted(path.name for path in found.iterdir())
"""
NEEDED = {"config.json": b'{"heads": 3}', "first.pt": b"a" * 9000, "second.pt": b"b" * 500}
LISTED = b'{"heads": 3, "files": ["third.pt"]}'


@pytest.fixture
def hub(server: FakeHub) -> FakeHub:
    heads = NEEDED | {"README.md": b"# words", "tokenizer.json": b"{}"}
    server.begin(
        {
            "org/heads": heads,
            "org/model": {"config.json": b'{"model_type": "llama"}', "first.pt": b"a"},
            "org/less": heads | {"config.json": LISTED},
        }
    )
    return server


@pytest.fixture
def visit(hub: FakeHub, tmp_path: Path) -> Visitor:
    return Visitor(hub, tmp_path, VISIT)


def test_head_is_downloaded_once(hub: FakeHub, visit: Visitor) -> None:
    said, again = visit.all("org/heads", "org/heads")
    assert said.files == list(NEEDED) and said.folder.endswith(COMMIT)
    assert sorted(hub.downloads()) == list(NEEDED) and again.folder == said.folder
    total = sum(len(NEEDED[name]) for name in ("first.pt", "second.pt"))
    assert said.progress[-1] == ["downloading org/heads", total, total, "bytes"]
    offline = visit("org/heads", HF_HUB_OFFLINE="1")
    assert (offline.folder, offline.notices, hub.log) == (said.folder, [], [])
    unplugged = visit("org/heads", HF_ENDPOINT=NOWHERE)
    assert unplugged.folder == said.folder and "cannot be reached" in unplugged.notices[0]
    (Path(said.folder) / "config.json").unlink()
    (Path(said.folder) / "config.json").write_bytes(LISTED)
    part = visit("org/heads", HF_HUB_OFFLINE="1")
    assert part.error == "ModelNotFoundError" and "is incomplete" in part.text


def test_only_the_configuration_of_a_model_is_downloaded(hub: FakeHub, visit: Visitor) -> None:
    said, less, absent = visit.all("org/model", "org/less", "org/absent")
    assert (said.folder, said.error, said.notices) == ("", "", [])
    assert set(hub.downloads()) == {"config.json"}
    assert less.error == "CheckpointError" and "lacks third.pt" in less.text
    assert absent.error == "ModelNotFoundError"
    assert visit("org/model", HF_HUB_OFFLINE="1").error == "ModelNotFoundError"  # not a complete copy
