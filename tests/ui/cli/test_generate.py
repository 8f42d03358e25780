"""`offspec generate` in this process: engine arguments, output, and errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from offspec.core.config import Constraint, EngineConfig, SamplingParams
from offspec.core.errors import ModelNotFoundError
from offspec.core.events import Mismatch
from offspec.core.events import Result as Answered
from offspec.core.sampling_defaults import describe_values, sampling_values
from offspec.ui.cli.render import statistics
from tests.support.fake_engine import RecordedRequest, Script, ScriptedEngine, ScriptedLoad
from tests.ui.cli.program import TEXT, error_line

Call = Callable[..., Result]

ASKED_OF_JSON = """text token_ids tokens passes tokens_per_pass seconds ttft_s tok_per_s bytes_streamed
bytes_read peak_memory_bytes finish_reason draft budget seed"""


def test_statistics_and_notices_go_to_stderr(offspec: Call) -> None:
    result = offspec("generate", "demo", "--", "-Why?")  # not an option
    assert (result.exit_code, result.stdout) == (0, TEXT + "\n") and "\x1b" not in result.stderr
    lines = result.stderr.splitlines()
    assert "reads are buffered: this file system [tmpfs] has no O_DIRECT" in lines
    assert any("6 tokens in 1.50 s: 4.00 tok/s, first token after 0.50 s" in line for line in lines)
    assert any(
        "2.00 tokens per pass, 3 passes; 2.40 GB streamed at 1.60 GB/s; peak memory 1.20 GB" in line
        for line in lines
    )
    assert any("draft self (4-bit), budget 64, temperature 0, seed 7" in line for line in lines)


def _result(streamed: int = 0, **changes: Any) -> Answered:
    given = "text", tuple(range(14)), 3, 2.0, 0.5, streamed, 10**9, "eos", "several", 64, 7
    return Answered(*given, **changes)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (4, "4.00 GB streamed at 2.00 GB/s; "),
        (0, "4.00 GB streamed at 2.00 GB/s; "),
        (1, "4.00 GB streamed at 2.00 GB/s, 1.00 GB read from disk; "),
    ],
    ids=["on a CPU", "from RAM to a GPU", "from both"],
)
def test_statistics_show_bytes_copied_and_read(read: int, expected: str) -> None:
    assert expected in statistics(_result(4 * 10**9, bytes_read=read * 10**9))[1]


def test_statistics_of_a_model_in_memory_name_no_streamed_weights() -> None:
    assert statistics(_result())[1] == "4.67 tokens per pass, 3 passes; peak memory 1.00 GB"
    read = statistics(_result(bytes_read=10**9))[1]
    assert read == "4.67 tokens per pass, 3 passes; 1.00 GB read from disk; peak memory 1.00 GB"


def test_draft_sources_are_shown_if_there_are_several() -> None:
    result = _result(guessed_by=(("self", 9), ("path/to/medusa", 2)))
    assert statistics(result)[-1] == "draft tokens: self 9, medusa 2; bonus tokens: 3"
    assert len(statistics(_result(guessed_by=(("suffix", 11),)))) == 3


def test_json_output_is_a_single_object(offspec: Call, engine: ScriptedEngine) -> None:
    result = offspec("generate", "demo", "Why?", "--system", "Be brief.", "--json")
    roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert engine.requests[0].prompt == roles
    answer = json.loads(result.stdout)
    assert answer.keys() >= {*ASKED_OF_JSON.split()}
    assert answer["text"] == TEXT
    assert len(answer["token_ids"]) == 6
    assert (answer["tokens"], answer["tokens_per_pass"], answer["tok_per_s"]) == (6, 2.0, 4.0)
    assert answer["mismatches"] is None
    assert result.stdout.count("\n") == 1
    engine.answers = [Script(TEXT, mismatches=(Mismatch(2, 5, 6, float("inf")),))]
    result = offspec("generate", "demo", "Why?", "--json", "--check")
    assert json.loads(result.stdout)["mismatches"][0]["gap"] is None
    assert "Infinity" not in result.stdout


def test_empty_answer_prints_nothing(offspec: Call, engine: ScriptedEngine) -> None:
    engine.answers = [""]
    result = offspec("generate", "demo", "Why?")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "0 tokens" in result.stderr and "ended by the model" in result.stderr


def test_check_reports_equal_tokens(offspec: Call, engine: ScriptedEngine) -> None:
    result = offspec("generate", "demo", "Why?", "--check", "--quiet")
    assert (result.stdout, engine.requests[0].check) == (TEXT + "\n", True)
    check = "check: same tokens without speculation (6 compared)"
    steps = ["[loading]", "[answering]", check, "[stream closed]", "[engine closed]"]
    assert result.stderr.splitlines() == steps


@pytest.mark.parametrize("options", [("--quiet",), ("--json",)])
def test_mismatch_is_an_error(offspec: Call, engine: ScriptedEngine, options: tuple[str, ...]) -> None:
    engine.answers = [Script(TEXT, mismatches=(Mismatch(2, 11, None, 0.0), Mismatch(4, 13, 14, 0.5)))]
    result = offspec("generate", "demo", "Why?", "--check", *options)
    assert result.exit_code == 1
    assert TEXT in (json.loads(result.stdout)["text"] if "--json" in options else result.stdout)
    messages = [line for line in result.stderr.splitlines() if line.startswith(("check:", "error:"))]
    check, another, error = messages
    assert check.startswith("check: token 2 is 11, without speculation the end of the answer; seed 7")
    assert another == "check: token 4 is 13, without speculation 14; seed 7, gap 0.5 nats"
    assert "bug in offspec" in error and "report" in error


def test_defaults_reach_the_engine(offspec: Call, load: ScriptedLoad) -> None:
    offspec("generate", "demo", "Why?")
    assert load.engine.requests == [
        RecordedRequest("Why?", SamplingParams(), raw=False, speculate=True, check=False)
    ]
    assert load.calls == [(EngineConfig("demo"), None)]


OWN = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", OWN),
        ("--greedy", SamplingParams()),
        ("--temperature 0", replace(OWN, temperature=0.0)),
        ("--temperature 1 --max-tokens 5", replace(OWN, temperature=1.0, max_tokens=5)),
        ("--top-k 0 --min-p 0.1", replace(OWN, top_k=0, min_p=0.1)),
        ("--greedy --temperature 0 --top-p 0.5", SamplingParams(top_p=0.5)),
        ("--check", SamplingParams()),
        ("--check --temperature 0.7", SamplingParams(temperature=0.7)),
    ],
)
def test_options_override_the_models_defaults(
    offspec: Call, engine: ScriptedEngine, options: str, expected: SamplingParams
) -> None:
    engine.sampling_defaults = OWN
    result = offspec("generate", "demo", "Why?", *options.split())
    assert result.exit_code == 0, result.output
    assert engine.requests[0].params == expected
    assert f"budget 64, {describe_values(sampling_values(expected))}, seed 7" in result.stderr


def test_json_contains_the_sampling_parameters(offspec: Call, engine: ScriptedEngine) -> None:
    engine.sampling_defaults = OWN
    answer = json.loads(offspec("generate", "demo", "Why?", "--json", "--top-p", "1").stdout)
    assert answer["sampling"] == {"temperature": 0.6, "top_k": 20}


def test_greedy_and_a_temperature_exclude_each_other(offspec: Call, load: ScriptedLoad) -> None:
    result = offspec("generate", "demo", "Why?", "--greedy", "--temperature", "0.7")
    assert (result.exit_code, load.calls) == (2, [])
    assert error_line(result) == "error: --greedy sets temperature 0: omit --greedy or --temperature"


def test_every_option_reaches_the_engine(offspec: Call, load: ScriptedLoad) -> None:
    args = """--draft small --draft-bits 4 --memory 1.5GB --vram 8GB --device cuda:1 --dtype float32
    --kv-cache int8 --cpu-layers 2 --experts gpu --cache-size 3GB
    --budget 64 --width 8 --context 999 --verify plain --check --raw --max-tokens 5 --temperature 0.5
    --top-p 0.9 --top-k 40 --min-p 0.05 --repetition-penalty 1.1 --presence-penalty 0.2
    --frequency-penalty 0.3 --seed 1 --stop END --stop ### --ignore-eos --tree sequoia --plan mine.json
    --quantize nf4 --draft-corpus README.md --bad-words alas --bad-words alack --no-repeat-ngram-size 4
    --min-tokens 2 --logit-bias 13=-2.5,198=1 --allowed-token-ids 1,2,30 --stop-token-ids 7 --json
    --logprobs 3"""
    result = offspec("generate", "demo", "Why?", *args.split())
    assert result.exit_code == 0, result.output
    config = EngineConfig(
        "demo",
        draft="small",
        draft_bits=4,
        memory=1_500_000_000,
        vram=8_000_000_000,
        device="cuda:1",
        dtype="float32",
        kv_cache="int8",
        cpu_layers=2,
        experts="gpu",
        budget=64,
        width=8,
        context=999,
        verify="plain",
        tree="sequoia",
        temperature=0.5,
        quantize="nf4",
        corpus=(Path("README.md"),),
        cache_size=3_000_000_000,
    )
    assert load.calls == [(config, Path("mine.json"))]
    (request,) = load.engine.requests
    assert request.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=1,
        max_tokens=5,
        stop=("END", "###"),
        ignore_eos=True,
        bad_words=("alas", "alack"),
        no_repeat_ngram_size=4,
        min_tokens=2,
        logit_bias=((13, -2.5), (198, 1.0)),
        allowed_token_ids=(1, 2, 30),
        stop_token_ids=(7,),
        logprobs=3,
    )
    assert (request.raw, request.speculate, request.check) == (True, True, True)


def test_formats(offspec: Call, load: ScriptedLoad, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}', "utf-8")
    for words, format in (
        (["--json-schema", str(schema)], Constraint("json_schema", '{"type": "integer"}')),
        (["--regex", "[a-z]+"], Constraint("regex", "[a-z]+")),
    ):
        assert offspec("generate", "demo", "Why?", *words).exit_code == 0
        assert load.engines[-1].requests[-1].params.format == format
    schema.write_text("{", "utf-8")
    for words, error in (
        (["--json-schema", str(schema)], "must be JSON"),
        (["--json-schema", str(schema), "--regex", "a"], "--json-schema and --regex exclude each other"),
        (["--json-schema", str(tmp_path / "none.json")], "cannot read --json-schema"),
        (["--regex", ""], "must not be empty"),
        (["--regex", "a", "--ignore-eos"], "--ignore-eos must be False"),
    ):
        result = offspec("generate", "demo", "Why?", *words)
        assert result.exit_code == 2 and error in result.stderr


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ('{"type": "number"', "a JSON schema must be JSON"),
        ("[]", "a JSON schema must be a JSON object"),
        ('{"type": "text"}', "the json schema cannot be enforced: Invalid type"),
        ('{"not": {}}', "the json schema cannot be enforced: Unimplemented keys"),
    ],
)
def test_a_schema_that_cannot_be_used_loads_nothing(
    offspec: Call, load: ScriptedLoad, tmp_path: Path, schema: str, error: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(schema, "utf-8")
    result = offspec("generate", "demo", "Why?", "--json-schema", str(file))
    assert (result.exit_code, load.calls) == (2, []) and result.stderr.startswith(f"error: {error}")


def test_omitted_options_are_left_to_the_plan(offspec: Call, load: ScriptedLoad) -> None:
    assert offspec("generate", "demo", "Why?", "--budget", "auto", "--width", "auto").exit_code == 0
    assert load.calls == [(EngineConfig("demo"), None)]


def test_without_speculation_no_draft_is_loaded(
    offspec: Call, load: ScriptedLoad, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OFFSPEC_CONFIG", str(tmp_path))
    (tmp_path / "config.toml").write_text('draft = "small"')
    assert offspec("generate", "demo", "Why?", "--no-speculation").exit_code == 0
    assert load.calls == [(EngineConfig("demo", draft="none"), None)]
    assert load.engine.requests[0].speculate is False


def test_a_draft_on_the_command_line_contradicts_no_speculation(offspec: Call, load: ScriptedLoad) -> None:
    result = offspec("generate", "demo", "Why?", "--draft", "small", "--no-speculation")
    assert (result.exit_code, load.calls) == (2, [])
    assert result.stderr == "error: --no-speculation uses no draft: omit --draft or --no-speculation\n"
    for draft in ("auto", "none"):
        assert offspec("generate", "demo", "Why?", "--draft", draft, "--no-speculation").exit_code == 0


@pytest.mark.parametrize("args", [(), ("-",)])
def test_prompt_from_stdin(offspec: Call, engine: ScriptedEngine, args: tuple[str, ...]) -> None:
    assert offspec("generate", "demo", *args, input="Warum ist\nder Himmel blau? ☀\n").exit_code == 0
    assert engine.requests[0].prompt == "Warum ist\nder Himmel blau? ☀"


@pytest.mark.parametrize(
    "args",
    [("Why?", "--budget", "0"), ("Why?", "--bogus"), (" \n ",), ("", "--raw"), ("Why?", "and", "more"), ()],
)
def test_invalid_request_loads_nothing(offspec: Call, load: ScriptedLoad, args: tuple[str, ...]) -> None:
    result = offspec("generate", "demo", *args)
    assert (result.exit_code, result.stdout, load.calls) == (2, "", [])


def test_unknown_model(offspec: Call, load: ScriptedLoad) -> None:
    load.fail = ModelNotFoundError("no model 'missing/model': neither a folder\nnor a hub id")
    result = offspec("generate", "missing/model", "Why?")
    assert result.exit_code == 1
    assert error_line(result) == "error: no model 'missing/model': neither a folder nor a hub id"


def test_error_during_an_answer_keeps_the_text_and_closes_the_engine(
    offspec: Call, engine: ScriptedEngine
) -> None:
    engine.answers = [Script(TEXT, fail_after=1, pass_tokens=1)]
    result = offspec("generate", "demo", "Why?", "--quiet")
    assert result.exit_code == 1
    assert result.stdout == "The\n"
    assert engine.steps == ["loading", "answering", "stream closed", "engine closed"]
    assert "model.safetensors, offset 4096" in error_line(result)


def test_unexpected_error_keeps_its_traceback(offspec: Call, engine: ScriptedEngine) -> None:
    engine.answers = [Script(TEXT, fail_after=0, error=ZeroDivisionError("an honest bug"))]
    result = offspec("generate", "demo", "Why?")
    assert isinstance(result.exception, ZeroDivisionError)
    assert "error:" not in result.stderr
