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
from typer.testing import CliRunner

from offspec.core.events import ignore_event
from offspec.server.batch.lines import read_lines
from offspec.server.batch.offline_run import BatchRun
from offspec.server.batch.results import ResultFile
from offspec.server.service import Service
from offspec.server.settings import Settings
from tests.server.batch_program import RandomAnswers
from tests.support.waiting import PATIENCE, wait_until

pytest.importorskip("ray")
pytestmark = pytest.mark.exhaustive

LONG = 5 * PATIENCE  # Ray starts many processes
OPTIONS = ["--device", "cpu", "--memory", "3GB", "--context", "128", "--draft", "none", "--dtype", "float32"]


def written(path: Path, count: int) -> Path:
    lines = [
        {
            "id": f"q{number}",
            "messages": [{"role": "user", "content": f"w{5 + number} w7"}],
            "sampling_params": {"temperature": number % 2, "max_tokens": 8 + number % 9},
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def said(out: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["id"] for line in found}) == len(found), "an id came twice"
    return {line["id"]: line for line in found}


def test_cluster_results_equal_one_machine(tmp_path: Path) -> None:
    """Though a worker is killed: another replaces it, and nothing is lost."""
    pyarrow = pytest.importorskip("pyarrow.parquet")
    requests, out, rows = written(tmp_path / "in", 40), tmp_path / "out", tmp_path / "rows"
    program = [sys.executable, "-m", "tests.ray.ray_program", str(requests), str(out), str(rows)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["killed"], told["workers"], told["torch"]) == (1, 3, False)
    with ResultFile(tmp_path / "single") as results:
        service = Service(RandomAnswers().opened, Settings(served_model_names=("tiny",)))
        BatchRun(service, results, ignore_event).run(read_lines(requests))
    expected = said(tmp_path / "single")
    assert said(out) == expected
    table = pyarrow.read_table(rows).to_pylist()
    assert {row["id"]: (row["generated_text"], row["num_generated_tokens"]) for row in table} == {
        name: (line["text"], line["completion_tokens"]) for name, line in expected.items()
    }
    assert {row["error"] for row in table} == {None} and table[0]["messages"][0]["role"] == "user"
    # A GPU for each engine, or a machine if there is none; a plan may have a device of its own.
    assert told["devices"] == [
        ["cpu num_cpus 2", "auto num_cpus 2", "cpu num_cpus 2"],
        ["cuda num_gpus 2", "auto num_gpus 2", "cpu num_cpus 3"],
    ]


def marked(mark: str) -> list[int]:
    """Return the live processes that inherited an environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"OFFSPEC_TEST_MARK={mark}\0".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended
    return found


def test_ctrl_c_keeps_finished_answers(tmp_path: Path) -> None:
    """On a cluster of its own: all processes end, only the way to resume is printed, and resuming works."""
    from offspec.ui.cli.main import app
    from tests.support.tiny_models import write_model

    model = write_model(tmp_path / "model", "llama")
    requests, out = written(tmp_path / "in", 2000), tmp_path / "out"
    program = [sys.executable, "-m", "offspec", "batch", str(requests), str(out), str(model), *OPTIONS]
    variables = {**os.environ, "OFFSPEC_TEST_MARK": tmp_path.name + str(os.getpid())}
    with subprocess.Popen(
        [*program, "--ray", "local"], env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        # The second result is written after the first is on the disk, so the first is kept in any case.
        wait_until(
            lambda: running.poll() is not None or (out.exists() and out.read_bytes().count(b"\n") > 1),
            seconds=LONG,
        )
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does, which signals the whole group
        told = running.stderr.read().splitlines()
    assert running.returncode == 130, told
    answered = said(out)
    assert 0 < len(answered) < 2000
    assert told[-1] == "stopped" and f"{len(answered)} of 2000 results are in" in told[-2]
    assert not [line for line in told if re.search("Traceback|Exception|Error", line)]
    wait_until(lambda: not marked(variables["OFFSPEC_TEST_MARK"]))
    # Three more, and then the same of all on this machine alone.
    lines = requests.read_text().splitlines(keepends=True)
    known = [line for line in lines if json.loads(line)["id"] in answered]
    left = [line for line in lines if line not in known][:3]
    requests.write_text("".join(left))
    subprocess.run([*program, "--ray", "local", "--quiet"], check=True, timeout=LONG)
    requests.write_text("".join([*known[:3], *left]))
    alone = tmp_path / "alone"
    ran = CliRunner().invoke(app, ["batch", str(requests), str(alone), str(model), *OPTIONS])
    assert ran.exit_code == 0, ran.output
    found = said(out)
    assert len(found) == len(answered) + 3
    assert {name: found[name] for name in said(alone)} == said(alone)
