"""Hub ids, with a fake Hub on the loopback address."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.checkpoint.hub_visitor import NOWHERE, Visitor
from tests.support.fake_hub import COMMIT, FakeHub
from tests.support.waiting import PATIENCE, wait_until

VISIT = """
from offspec.checkpoint import open_checkpoint
def visit(name, events, said):
    found = open_checkpoint(name, notify=events.append)
    said["folder"] = str(found.folder)
    said["tensors"] = {name: info.file.name for name, info in found.tensors.items()}
    said["files"] = sorted(path.name for path in found.folder.iterdir())
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
def hub(server: FakeHub) -> FakeHub:
    server.begin({"org/model": {**MODEL, **EXTRA}})
    return server


@pytest.fixture
def visit(hub: FakeHub, tmp_path: Path) -> Visitor:
    return Visitor(hub, tmp_path, VISIT)


def test_required_files_are_downloaded_once(hub: FakeHub, visit: Visitor) -> None:
    said = visit("org/model", SMALL_PIECES)
    assert said.tensors == {"t1": FIRST, "t2": SECOND}
    assert said.files == sorted(MODEL) == sorted(hub.downloads())
    assert said.folder.endswith(COMMIT)
    done = [entry[1] for entry in said.progress]
    assert done == sorted(set(done)) and len(done) > 10
    total = sum(len(data) for name, data in MODEL.items() if not name.endswith("index.json"))
    assert said.progress[-1] == ["downloading org/model", total, total, "bytes"]

    again = visit("org/model")
    assert (again.tensors, again.progress, hub.downloads()) == (said.tensors, [], [])
    offline, commit, other = visit.all(
        "org/model", f"org/model@{COMMIT}", "org/model@other", HF_HUB_OFFLINE="1"
    )
    assert (offline.folder, offline.tensors, offline.notices) == (said.folder, said.tensors, [])
    assert hub.log == []
    assert commit.tensors == said.tensors and other.error == "ModelNotFoundError"
    unplugged = visit("org/model", HF_ENDPOINT=NOWHERE)
    assert unplugged.tensors == said.tensors and "cannot be reached" in unplugged.notices[0]


def test_offline_without_a_complete_copy(visit: Visitor) -> None:
    said = visit("org/model", HF_ENDPOINT=NOWHERE)
    assert said.error == "ModelNotFoundError" and "connect to the network" in said.text
    (Path(visit("org/model").folder) / SECOND).unlink()
    said, absent = visit.all("org/model", "org/absent", HF_HUB_OFFLINE="1")
    assert said.error == "ModelNotFoundError" and "is incomplete" in said.text
    assert absent.error == "ModelNotFoundError" and "HF_HUB_OFFLINE is set" in absent.text
    assert visit("org/model").tensors  # and with a network it is completed


def test_interrupted_download_resumes(hub: FakeHub, visit: Visitor) -> None:
    hub.cut.add(FIRST)
    said = visit("org/model", SMALL_PIECES)
    assert list(said.tensors) == ["t1", "t2"]
    asked = [ranged for method, path, ranged in hub.log if method == "GET" and path.endswith(FIRST)]
    assert asked[0] is None
    assert asked[1] is not None and int(asked[1].removeprefix("bytes=").rstrip("-")) > 4096
    assert said.progress[-1][1] == said.progress[-1][2]


def test_failed_download_keeps_finished_files(hub: FakeHub, visit: Visitor) -> None:
    hub.dead.add(SECOND)
    said = visit("org/model", "import time; time.sleep = lambda seconds: None")
    assert said.error == "CheckpointError" and "run the same command again" in said.text
    assert visit("org/model", HF_HUB_OFFLINE="1").error == "ModelNotFoundError"
    hub.dead.clear()
    said = visit("org/model")
    assert list(said.tensors) == ["t1", "t2"]
    assert hub.downloads() == [SECOND]
    assert said.progress[-1][1:3] == [len(SHARDS[SECOND])] * 2


def test_ctrl_c_ends_a_stalled_download(hub: FakeHub, visit: Visitor) -> None:
    """Download threads, such as those of `snapshot_download`, keep the process until the Hub responds."""
    hub.stalled.add(SECOND)
    setup = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    with visit.start("org/model", setup=setup, HF_HUB_DOWNLOAD_TIMEOUT="600") as process:
        try:
            wait_until(lambda: SECOND in hub.downloads())
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.communicate(timeout=PATIENCE)[1]
        finally:
            process.kill()
    hub.stalled.clear()
    assert visit("org/model", HF_HUB_OFFLINE="1").error == "ModelNotFoundError"
    assert list(visit("org/model").tensors) == ["t1", "t2"]
    assert hub.downloads() == [SECOND]


def test_refusals(hub: FakeHub, visit: Visitor) -> None:
    hub.repositories["org/gated"] = MODEL
    hub.gated.add("org/gated")
    expected = {
        "org/absent": ["no such public model", "check the spelling"],
        "org/model@v9": ["no revision v9"],
        "org/gated": ["requires permission", "hf auth login"],
        "org/a..b": ["is not a hub id", "organization/name"],
    }
    for said, words in zip(visit.all(*expected), expected.values(), strict=True):
        assert said.error == "ModelNotFoundError"
        assert all(word in said.text for word in words), said.text


def test_repositories_without_a_model(hub: FakeHub, visit: Visitor) -> None:
    config = {"config.json": b"{}"}
    hqq = b'{"quantization_config": {"quant_method": "hqq"}}'
    cases: list[tuple[dict[str, bytes], str]] = [
        (
            {"a.gguf": b"", "b.gguf": b"", **config},
            "2 GGUF models: name one, as in org/0:a, of a (0 B), b (0 B)",
        ),
        ({"pytorch_model.bin": b"", **config}, "convert it to safetensors"),
        ({"README.md": b""}, "no safetensors weights"),
        ({"model.safetensors": b""}, "no config.json"),
        ({"model.safetensors.index.json": INDEX, **config}, "lacks model-00001-of-00002"),
        ({"model.safetensors.index.json": b"[", **config}, "not valid JSON"),
        ({**MODEL, "config.json": hqq}, "by hqq"),
    ]
    for number, (files, _) in enumerate(cases):
        hub.repositories[f"org/{number}"] = files
    found = visit.all(*(f"org/{number}" for number in range(len(cases))))
    for said, (_, words) in zip(found, cases, strict=True):
        assert said.error and words in said.text, said
    assert {said.error for said in found} == {
        *("CheckpointError", "HeaderError", "ModelNotFoundError", "UnsupportedModelError")
    }
    assert not any(name.endswith((".gguf", ".bin", ".safetensors")) for name in hub.downloads())


def test_disk_that_is_too_small(hub: FakeHub, visit: Visitor) -> None:
    small = "usage = shutil.disk_usage('/'); shutil.disk_usage = lambda path: usage._replace(free=9999)"
    said = visit("org/model", small)
    assert said.error == "DiskFullError"
    assert "downloading org/model needs" in said.text and "HF_HOME" in said.text
    assert hub.downloads() == ["model.safetensors.index.json"]


def test_disk_fills_up(visit: Visitor) -> None:
    full = """
import huggingface_hub.file_download as f
def http_get(*_, **__): raise OSError(errno.ENOSPC, "No space left on device")
f.http_get = http_get
"""
    said = visit("org/model", full)
    assert said.error == "DiskFullError" and "free some space" in said.text
