"""Batches on a local Ray cluster of two workers equal those of one machine, also when a worker dies."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until

pytest.importorskip("ray")

pytestmark = pytest.mark.slow


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"q{number}",
            "messages": [{"role": "user", "content": f"w{5 + number} w7"}],
            "sampling_params": {"temperature": number % 2, "max_tokens": 8 + number % 9},
        }
        for number in range(count)
    ]


def ray(command: str, model: str, requests: Path, out: Path) -> dict[str, Any]:
    """What the driver says in the end."""
    program = [sys.executable, "-m", "tests.ray.ray_program", command, model, str(requests), str(out)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not told["torch"]
    return told


def single(model: str, requests: Path, out: Path) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.server.batch_program", model, str(requests), str(out)]
    subprocess.run(program, check=True, timeout=170)
    return said(out)


def said(out: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["id"] for line in found}) == len(found), "an id came twice"
    return {line["id"]: line for line in found}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(40)))
    return path


def test_two_workers_say_what_one_machine_says(tmp_path: Path, requests: Path) -> None:
    from tests.support.tiny_models import write_model

    write_model(tmp_path / "model", "llama")
    wrong = {"id": "wrong", "prompt": 3}
    requests.write_text(requests.read_text() + json.dumps(wrong) + "\n")
    told = ray("run", str(tmp_path / "model"), requests, tmp_path / "out")
    assert told["workers"] == 2
    assert said(tmp_path / "out") == single(str(tmp_path / "model"), requests, tmp_path / "single")


def test_a_worker_is_killed(tmp_path: Path, requests: Path) -> None:
    """Another takes its place, and nothing is lost."""
    told = ray("kill", "", requests, tmp_path / "out")
    assert told["killed"] == 1 and told["workers"] == 3
    assert said(tmp_path / "out") == single("", requests, tmp_path / "single")


def test_rows_become_parquet(tmp_path: Path, requests: Path) -> None:
    import pyarrow.parquet

    ray("rows", "", requests, tmp_path / "out")
    expected = single("", requests, tmp_path / "single")
    rows = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
    assert {row["id"]: row["generated_text"] for row in rows} == {
        name: line["text"] for name, line in expected.items()
    }
    assert {row["error"] for row in rows} == {None} and rows[0]["messages"][0]["role"] == "user"
    assert {row["num_generated_tokens"] for row in rows} == {
        line["completion_tokens"] for line in expected.values()
    }


_ON_CLUSTER = """
import os, sys
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
from ray.cluster_utils import Cluster
from offspec.core.config import EngineConfig
from offspec.ray.predict import on_cluster
from offspec.ray.run import connected
store = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **store})
try:
    cluster.add_node(num_gpus=int(sys.argv[1]), **store)
    with connected(cluster.address):
        for device, planned in (("auto", False), ("auto", True), ("cpu", False)):
            config, pool = on_cluster(EngineConfig("tiny", device=device), None, planned=planned)
            print(config.device, *(name for name in pool if name != "compute"), pool["compute"].max_size)
finally:
    cluster.shutdown()
"""


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ("0", ["cpu num_cpus 2", "auto num_cpus 2", "cpu num_cpus 2"]),
        ("2", ["cuda num_gpus 2", "auto num_gpus 2", "cpu num_cpus 2"]),
    ],
)
def test_auto_takes_the_gpus_of_a_cluster(gpus: str, found: list[str]) -> None:
    """A GPU for each engine, or a machine if there is none; a plan may have a device of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_CLUSTER, gpus], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == found, done.stderr[-3000:]


def marked(mark: str) -> list[int]:
    """Processes that live and have inherited an environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"OFFSPEC_TEST_MARK={mark}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended
    return found


def test_ctrl_c_ends_it_and_keeps_what_is_answered(tmp_path: Path, requests: Path) -> None:
    """On a cluster of its own: nothing of it goes on, nothing is said but where to go on, and that works."""
    from tests.support.tiny_models import write_model

    write_model(tmp_path / "model", "llama")
    out, many = tmp_path / "out", lines(2000)
    requests.write_text("".join(json.dumps(line) + "\n" for line in many))
    options = [
        "--ray",
        "local",
        "--device",
        "cpu",
        "--memory",
        "1GB",
        "--context",
        "128",
        "--draft",
        "none",
        "--dtype",
        "float32",
    ]
    program = [sys.executable, "-m", "offspec", "batch", str(requests), str(out), str(tmp_path / "model")]
    variables = {**os.environ, "OFFSPEC_TEST_MARK": tmp_path.name + str(os.getpid())}
    with subprocess.Popen(
        [*program, *options], env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        until(lambda: running.poll() is not None or (out.exists() and b"\n" in out.read_bytes()))
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does, which strikes all of a group
        told = running.stderr.read().splitlines()
    assert running.returncode == 130, told
    answered = said(out)
    assert 0 < len(answered) < len(many)
    assert told[-1] == "stopped" and f"{len(answered)} of {len(many)} results are in" in told[-2]
    assert not [line for line in told if re.search("Traceback|Exception|Error", line)]
    until(lambda: not marked(variables["OFFSPEC_TEST_MARK"]))
    left = [line for line in many if line["id"] not in answered][:3]
    requests.write_text("".join(json.dumps(line) + "\n" for line in left))
    subprocess.run([*program, *options, "--quiet"], check=True, timeout=170)
    assert said(out).keys() == answered.keys() | {line["id"] for line in left}
