"""Hub ids, against a stand-in on the loopback."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.checkpoint.hub_standin import COMMIT, StandIn
from tests.checkpoint.hub_visitor import Visitor

VISIT = """
import errno, json, shutil, sys
from offspec.checkpoint import open_checkpoint
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress
exec(sys.argv[2])
events = []
said = {}
try:
    found = open_checkpoint(sys.argv[1], notify=events.append)
    said["folder"] = str(found.folder)
    said["tensors"] = {name: info.file.name for name, info in found.tensors.items()}
    said["files"] = sorted(path.name for path in found.folder.iterdir())
except OffspecError as error:
    said["error"] = type(error).__name__
    said["text"] = str(error)
said["progress"] = [(e.stage, e.done, e.total, e.unit) for e in events if isinstance(e, LoadProgress)]
said["notices"] = [e.text for e in events if not isinstance(e, LoadProgress)]
print(json.dumps(said))
"""
SMALL_PIECES = "import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 4096"
SHARDS = {f"model-0000{n}-of-00002.safetensors": save({f"t{n}": torch.randn(90, 90)}) for n in (1, 2)}
FIRST, SECOND = SHARDS
INDEX = json.dumps({"weight_map": {f"t{n}": name for n, name in enumerate(SHARDS, 1)}}).encode()
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    **SHARDS,
}
EXTRA = {
    "README.md": b"# words",
    "pytorch_model.bin": b"pickled" * 99,
    "consolidated.safetensors": save({"other": torch.zeros(9)}),
    "model.gguf": b"GGUF" * 99,
    "onnx/model.onnx": b"x" * 99,
    "original/config.json": b"{}",
}


@pytest.fixture
def hub(server: StandIn) -> StandIn:
    server.repositories = {"org/model": {**MODEL, **EXTRA}}
    for record in (server.gated, server.cut, server.dead, server.log):
        record.clear()
    return server


@pytest.fixture
def visit(hub: StandIn, tmp_path: Path) -> Visitor:
    return Visitor(hub, tmp_path, VISIT)


NOWHERE = "http://127.0.0.1:9"


def test_what_the_model_needs_is_fetched_once(hub: StandIn, visit: Visitor) -> None:
    said = visit("org/model", SMALL_PIECES)
    assert said.tensors == {"t1": FIRST, "t2": SECOND}
    assert said.files == sorted(MODEL)
    assert said.folder.endswith(COMMIT)
    assert sorted(hub.downloads()) == sorted(MODEL)
    done = [entry[1] for entry in said.progress]
    assert done == sorted(set(done))
    assert len(done) > 10
    total = sum(len(data) for name, data in MODEL.items() if not name.endswith("index.json"))
    assert said.progress[-1] == ["downloading org/model", total, total, "bytes"]
    again = visit("org/model")
    assert (again.tensors, again.progress, hub.downloads()) == (said.tensors, [], [])


@pytest.mark.exhaustive
def test_offline_reuse(hub: StandIn, visit: Visitor) -> None:
    first = visit("org/model")
    offline = visit("org/model", HF_HUB_OFFLINE="1")
    assert (offline.folder, offline.tensors, offline.notices) == (first.folder, first.tensors, [])
    assert hub.log == []
    unplugged = visit("org/model", HF_ENDPOINT=NOWHERE)
    assert unplugged.tensors == first.tensors
    assert "cannot be reached" in unplugged.notices[0]
    assert visit(f"org/model@{COMMIT}", HF_HUB_OFFLINE="1").tensors == first.tensors
    assert visit("org/model@other", HF_HUB_OFFLINE="1").error == "ModelNotFoundError"


def test_offline_without_a_copy(visit: Visitor) -> None:
    said = visit("org/model", HF_HUB_OFFLINE="1")
    assert said.error == "ModelNotFoundError"
    assert "HF_HUB_OFFLINE is set" in said.text
    said = visit("org/model", HF_ENDPOINT=NOWHERE)
    assert said.error == "ModelNotFoundError"
    assert "connect to the network" in said.text


def test_offline_with_part_of_a_copy(visit: Visitor) -> None:
    folder = Path(visit("org/model").folder)
    (folder / SECOND).unlink()
    said = visit("org/model", HF_HUB_OFFLINE="1")
    assert said.error == "ModelNotFoundError"
    assert "not whole" in said.text
    assert visit("org/model").tensors  # and with a network it is made whole


@pytest.mark.exhaustive
def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: StandIn, visit: Visitor) -> None:
    hub.cut.add(FIRST)
    said = visit("org/model", SMALL_PIECES)
    assert list(said.tensors) == ["t1", "t2"]
    asked = [ranged for method, path, ranged in hub.log if method == "GET" and path.endswith(FIRST)]
    assert asked[0] is None
    assert asked[1] is not None and int(asked[1].removeprefix("bytes=").rstrip("-")) > 4096
    assert said.progress[-1][1] == said.progress[-1][2]


def test_a_download_that_stops_keeps_what_is_finished(hub: StandIn, visit: Visitor) -> None:
    hub.dead.add(SECOND)
    said = visit("org/model", "import time; time.sleep = lambda seconds: None")
    assert said.error == "CheckpointError"
    assert "run the same command again" in said.text
    assert visit("org/model", HF_HUB_OFFLINE="1").error == "ModelNotFoundError"
    hub.dead.clear()
    said = visit("org/model")
    assert list(said.tensors) == ["t1", "t2"]
    assert hub.downloads() == [SECOND]
    assert said.progress[-1][1:3] == [len(SHARDS[SECOND])] * 2


@pytest.mark.exhaustive
def test_answers_that_are_no(hub: StandIn, visit: Visitor) -> None:
    hub.repositories["org/gated"] = MODEL
    hub.gated.add("org/gated")
    for model, words in {
        "org/absent": ["no such public model", "check the spelling"],
        "org/model@v9": ["no revision v9"],
        "org/gated": ["asks for permission", "hf auth login"],
        "org/a..b": ["is not a hub id", "organisation/name"],
    }.items():
        said = visit(model)
        assert said.error == "ModelNotFoundError", model
        assert all(word in said.text for word in words), said.text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"a.gguf": b"", "b.gguf": b"", "config.json": b"{}"},
            "2 GGUF models: name one, as in org/other:a, of a (0 B), b (0 B)",
        ),
        ({"pytorch_model.bin": b"", "config.json": b"{}"}, "convert it to safetensors"),
        ({"README.md": b""}, "no safetensors weights"),
        ({"model.safetensors": b""}, "no config.json"),
        ({"config.json": b"{}", "model.safetensors.index.json": INDEX}, "lacks model-00001-of-00002"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"["}, "not JSON"),
    ],
)
def test_repositories_that_hold_no_model(
    hub: StandIn, visit: Visitor, files: dict[str, bytes], words: str
) -> None:
    hub.repositories["org/other"] = files
    said = visit("org/other")
    assert said.error in ("CheckpointError", "HeaderError", "ModelNotFoundError")
    assert words in said.text
    assert not any(name.endswith((".gguf", ".bin")) for name in hub.downloads())


def test_a_method_that_is_not_read_is_known_before_the_weights_come(hub: StandIn, visit: Visitor) -> None:
    config = b'{"quantization_config": {"quant_method": "hqq"}}'
    hub.repositories["org/other"] = {**MODEL, "config.json": config}
    said = visit("org/other")
    assert said.error == "UnsupportedModelError" and "by hqq" in said.text
    assert not any(name.endswith(".safetensors") for name in hub.downloads())


def test_a_disk_too_small_is_known_beforehand(hub: StandIn, visit: Visitor) -> None:
    small = "usage = shutil.disk_usage('/'); shutil.disk_usage = lambda path: usage._replace(free=9999)"
    said = visit("org/model", small)
    assert said.error == "DiskFullError"
    assert "downloading org/model needs" in said.text
    assert "HF_HOME" in said.text
    assert hub.downloads() == ["model.safetensors.index.json"]


def test_a_disk_that_fills_up(visit: Visitor) -> None:
    full = """
import huggingface_hub.file_download as f
def http_get(*_, **__): raise OSError(errno.ENOSPC, "No space left on device")
f.http_get = http_get
"""
    said = visit("org/model", full)
    assert said.error == "DiskFullError"
    assert "make room" in said.text
