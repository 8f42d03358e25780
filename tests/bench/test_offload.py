"""The offload bench on made-up answers: its order, its exit code and its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import offload
from bench.lib import streamed
from bench.lib.report import Prompt
from offspec_planners.measure import Bandwidth
from tests.support.bench_runs import RunBench


@pytest.mark.parametrize("differ", [False, True])
def test_a_run(differ: bool, tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"factor": 4, "fingerprint": "", "layer_files": ["layer"], "layer_bytes": 8000}
    (tmp_path / "widened.json").write_text(json.dumps({**recipe, "head_bytes": 9, "matmul_parameters": 5}))
    (tmp_path / "config.json").write_text("{}")

    def ask(args: Any, folder: Path, group: Any, temperature: float, on: bool) -> dict[str, Any]:
        passes, tokens = (4, 16) if on else (8, 8)
        one = {"draft_seconds": 0.5, "target_seconds": 0.5, "tree_nodes": 8}
        sums = {"draft_seconds": 0.5 * passes, "target_seconds": 0.5 * passes, "bytes_streamed": 100 * passes}
        ids = [99] if differ and not on else list(range(tokens))
        counts = {"tokens": tokens, "passes": passes, "seconds": float(passes), "ttft_s": 1.0, **sums}
        about = {"token_ids": ids, "finish_reason": "length", "per_pass": [one] * passes, **counts}
        answers = [{"id": prompt.id, **about} for _, prompt in group]
        return {"speculate": on, "temperature": temperature, "answers": answers}

    monkeypatch.setattr(offload, "widened", lambda args: tmp_path)
    monkeypatch.setattr(offload, "product_rates", lambda config, tokens, dtype: dict.fromkeys(tokens, 1e9))
    monkeypatch.setattr(offload, "raw_bandwidth", lambda *args: Bandwidth(1000, 1.0, True))
    monkeypatch.setattr(offload, "ask", ask)
    ran = run_bench(offload.main, "--no-cgroup", "--keep-caches", "--prompts", "4")
    assert ran.code == int(differ)
    assert any("135M pair" in line for line in ran.lines)
    assert [row["speed_up"] for row in ran.summary["runs"]] == [4.0, 4.0]
    assert ran.summary["liberties"] == ["a memory cgroup", "dropping the caches"]
    order = [run["speculate"] for run in ran.record["processes"]]
    assert order == [False, True, True, False] * 2  # in turns


def test_what_a_measured_process_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def job(args: Any, module: str, asked: dict[str, Any]) -> dict[str, Any]:
        sent.append(asked)
        return {"answers": []}

    monkeypatch.setattr(streamed, "measured_job", job)
    args = offload.main.parser().parse_args(["--draft", "demo"])
    prompt = Prompt("chat-1", "chat", "hello")
    for on in (False, True):
        found = streamed.ask(args, tmp_path, [(3, prompt)], 1.0, on)
        assert found == {"speculate": on, "temperature": 1.0, "answers": []}
    told = [(job["load"]["draft"], job["params"]["max_tokens"], job["speculate"]) for job in sent]
    assert told == [("none", 8, False), ("demo", 48, True)]
    assert sent[0]["prompts"] == [{"number": 3, "id": "chat-1", "text": "hello"}]
