"""Failures of files, memory and users: one line of text, the right exit code, nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import offspec
from offspec import CapacityError, ClosedError, Event, Notice, RequestError, SamplingParams, StreamError
from offspec.draft.lm import LMDrafter
from tests.support.answers import PROMPT, generate_tokens, sampling
from tests.support.tiny_models import tiny_engine, write_model, write_tokenizer
from tests.support.weight_files import restorer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """Copy of the model for tests that damage it."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def run(*args: object) -> Result:
    from offspec.ui.cli.main import app

    return CliRunner().invoke(app, ["generate", *map(str, args)], prog_name="offspec")


def failed(result: Result, code: int) -> str:
    """Return the one line of an error; check that stdout is empty."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr
    return lines[0]


def test_a_whole_model_answers(model: Path) -> None:
    result = run(model, "w5 w9", "--max-tokens", 5, "--json", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["tokens"] == len(answer["token_ids"]) <= 5
    assert answer["draft"] == "suffix"  # all of it is in memory
    unplanned = ("--draft", "self", "--budget", 8, "--width", 4)  # a plan might leave the draft out
    drafted = run(model, "w5 w9", "--max-tokens", 5, "--json", "--dtype", "float32", *unplanned)
    named = json.loads(drafted.stdout)
    assert (named["draft"], named["token_ids"]) == ("self (4-bit)", answer["token_ids"])


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "no_such"},
        {"rope_parameters": {"rope_type": "no_such", "rope_theta": 1e4}},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_odd_configurations_are_one_line_each(model: Path, change: dict[str, Any]) -> None:
    """For more see `tests/ui/test_bad_inputs.py`."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    assert "tokenizer" not in failed(run(model, "w5"), 1)


def test_an_answer_that_fills_the_context_is_reported(model: Path) -> None:
    args = (model, "w5", "--context", 24, "--max-tokens", 100, "--ignore-eos", "--json", "--dtype", "float32")
    answer = json.loads(run(*args).stdout)
    assert answer["finish_reason"] == "context"
    assert answer["prompt_tokens"] + answer["tokens"] == 24


def test_too_little_memory_reports_the_minimum(model: Path) -> None:
    with pytest.raises(CapacityError, match="is too little: the minimum is") as caught:
        offspec.load(str(model), memory=10_000_000)
    assert caught.value.given == 10_000_000 < caught.value.needed
    with offspec.load(str(model), memory=caught.value.needed + 20_000_000) as engine:
        assert engine.generate(PROMPT, SamplingParams(max_tokens=4)).tokens


def test_a_draft_that_does_not_fit_is_left_out_with_a_notice(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offspec.plan import needs

    real = needs.draft_bytes
    monkeypatch.setattr(
        needs, "draft_bytes", lambda held, *rest: (1 << 60) if held[0] != "none" else real(held, *rest)
    )
    for draft, left, said in (("auto", "suffix", "suffix alone"), ("self", "none", "no draft")):
        notices = list[Event]()
        with offspec.load(str(whole), draft=draft, notify=notices.append) as engine:
            assert engine.draft == left
            assert engine.generate(PROMPT, SamplingParams(max_tokens=4)).tokens
        texts = [event.text for event in notices if isinstance(event, Notice)]
        assert any(said in text and "`draft`" in text for text in texts)


def test_a_file_truncated_during_a_run_is_one_error_and_the_engine_stays_usable(model: Path) -> None:
    params = sampling(0.0, 12)
    file = model / "model.safetensors"
    put_back = restorer(file)
    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, params).token_ids
        os.truncate(file, 5000)
        with pytest.raises(StreamError, match="ended early") as caught:
            engine.generate(PROMPT, params)
        assert caught.value.file == file
        put_back()
        assert engine.generate(PROMPT, params).token_ids == expected


def test_an_interrupt_leaves_the_engine_usable(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts during drafting, during a pass, and in a stream that is not read to its end."""
    params, expanding, steps = sampling(0.8, 12), LMDrafter.expand_steps, iter(range(1000))
    (expected,) = generate_tokens(whole, params)

    def struck(*args: Any) -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return expanding(*args)

    with tiny_engine(whole, "auto", budget=4) as engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LMDrafter, "expand_steps", struck)
            engine.generate(PROMPT, params)
        assert engine.generate(PROMPT, params).token_ids == expected
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            layer: Any = engine._assembly.target.skeleton.layers[1]
            patch.setattr(layer.mlp, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            engine.generate([7, 7, 7], params)
        assert engine.generate(PROMPT, params).token_ids == expected
        stream = engine.stream(PROMPT, params)
        for _ in range(4):
            next(stream)
        stream.close()
        assert engine.generate(PROMPT, params).token_ids == expected


def test_a_closed_engine_raises(model: Path) -> None:
    engine = tiny_engine(model, "auto")
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.generate(PROMPT)


def test_models_are_freed_if_the_device_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(devices: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine = tiny_engine(model, "auto")
    freed = list[str]()
    monkeypatch.setattr(engine._assembly.target, "close", partial(freed.append, "target"))
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="CUDA error"):
        patched.setattr("offspec.model.devices.synchronize", fail)
        engine.close()
    assert freed == ["target"]


def test_an_open_stream_neither_hangs_its_own_thread_nor_the_end_of_the_engine(model: Path) -> None:
    with pytest.raises(ZeroDivisionError), tiny_engine(model, "none", budget=1) as engine:
        stream = engine.stream(PROMPT, sampling(0.0, 30))
        next(stream)
        with pytest.raises(RequestError, match="another answer of this engine is running"):
            engine.generate(PROMPT)
        raise ZeroDivisionError  # the caller's own mistake: leaving the engine must not wait for the stream
    assert list(stream) == []


def test_a_token_outside_the_vocabulary_is_a_request_error(model: Path) -> None:
    write_tokenizer(model, 120)  # a tokenizer with words that the embedding has no rows for
    assert "outside the vocabulary" in failed(run(model, "w110", "--draft", "none"), 2)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process during an answer that is longer than a pipe buffer."""
    model = write_model(tmp_path / "model", max_position_embeddings=32768)
    command = [sys.executable, "-m", "offspec", "generate", str(model), "w5 w9", "--max-tokens", "40000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--ignore-eos", "--device", "cpu", "--context", "30000", "--budget", "2", "--width", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield process
    process.kill()
    process.wait()


@pytest.mark.exhaustive
def test_ctrl_c_stops_cleanly_and_keeps_the_text_so_far(running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    first = running.stdout.read(3)  # the answer has begun
    running.send_signal(signal.SIGINT)
    rest, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert first.startswith("w") and (first + rest).strip()
    assert "Traceback" not in errors


def test_a_full_disk_while_a_gguf_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model with its cache on a full disk: no files are left over."""
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    line = failed(run("demo", "hi"), 1)
    assert "room" in line or "disk" in line or "space" in line
    assert not list((tmp_path / "cache").rglob("*.json"))
