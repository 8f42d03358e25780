"""User errors: one line that names the remedy, and no traceback.

Each kind of error is tried with one command, and each command gets several kinds, in turn. The program runs
in this process, with a tiny model that the case may damage. If only a path or an option is wrong, the error
comes before torch is imported; the last test checks that in a process of its own.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from tests.support.tiny_models import write_model
from tests.ui.cli.program import run

GARBAGE = b"\x00\xff\xfe garbage \x80" * 40
SHARD = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"
ONE_TOKEN = ("--draft", "none", "--budget", "1", "--width", "1")  # nothing is measured or planned
Damage = Callable[[Path], object]


class Place(NamedTuple):
    """A folder for one case, with a model that may be damaged and an intact one."""

    root: Path
    whole: Path

    @property
    def model(self) -> Path:
        """A copy, made on first use."""
        folder = self.root / "model"
        return folder if folder.exists() else Path(shutil.copytree(self.whole, folder))

    def file(self, name: str, content: str | bytes = "") -> Path:
        """Write a file with this content, and create its folders."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model", num_hidden_layers=2)


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, whole)


def call(*args: object, input: str | bytes | None = None) -> Result:
    from offspec.ui.cli.main import app

    return CliRunner().invoke(app, list(map(str, args)), input=input, prog_name="offspec")


def complaint(result: Result, code: int) -> str:
    """Return the only line on stderr, unwrapped, after checking exit code and stdout."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert "Traceback" not in result.stderr
    if result.stderr.startswith("Usage: "):
        inside = re.findall(r"^│ (.*?) *│$", result.stderr, re.MULTILINE)
        assert inside and result.stderr.count("╭─ Error") == 1, result.stderr
        return " ".join(line.strip() for line in inside)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert len(lines[0]) < 600
    return lines[0]


# Arguments before and after the model.
COMMANDS = {
    "generate": "generate {} w5 --quiet --max-tokens 2",
    "chat": "chat {} --plain --quiet",
    "plan": "plan {} --quiet",
    "pack": "pack {} --to nf4 --out out --quiet",
    "distill": "distill {} --kind medusa --out out --quiet --tokens 1000",
    "serve": "serve {} --port 0 --quiet",
    "bench": "bench {} --quiet",
}


def words(command: str, model: object) -> list[object]:
    return [model if word == "{}" else word for word in COMMANDS[command].split()]


def by_turns(kinds: Iterable[str], *commands: str) -> Iterator[tuple[str, str]]:
    """Pair each kind with one of the commands, by default of all."""
    return zip(kinds, cycle(commands or COMMANDS), strict=False)


# Invalid model names, and a part of the error.
NAMES: dict[str, tuple[Callable[[Place], object], str]] = {
    "blanks": (lambda place: "  ", "no model given"),
    "a hub id without a network": (lambda place: "organization/no-such-model", "HF_HUB_OFFLINE is set"),
    "a relative path": (lambda place: "./nowhere/model", "check the path"),
    "a name with a NUL": (lambda place: "model\0", "unknown model"),
    "a link to nothing": (lambda place: linked(place), "check the path"),
    "a folder of something else": (lambda place: place.file("other/readme.txt").parent, "no config.json"),
    "a folder of GGUF files": (lambda place: place.file("ggufs/a.gguf", "hi").parent, "name one of them"),
    "a folder with an adapter": (lambda place: place.file("a/adapter_config.json", "{}").parent, "merge it"),
    "a GGUF file cut short": (lambda place: place.file("cut.gguf", b"GGUF\x03\0\0\0"), "cut.gguf"),
    "a device": (lambda place: "/dev/null", "check the path"),
}


def linked(place: Place) -> Path:
    (place.root / "link").symlink_to(place.root / "gone")
    return place.root / "link"


@pytest.mark.parametrize(("kind", "command"), by_turns(NAMES))
def test_invalid_model_names(place: Place, command: str, kind: str) -> None:
    name, expected = NAMES[kind]
    assert expected in complaint(call(*words(command, name(place))), 1)


def test_only_plan_accepts_a_model_without_weights(place: Place) -> None:
    config = place.model / "config.json"
    for command, more in (("generate", []), ("plan", ["--validate"])):
        assert "has no weights and is not a model" in complaint(call(*words(command, config), *more), 1)


def rewrite(**changes: Any) -> Damage:
    """Change config.json; None removes a key."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (model / "config.json").write_text(json.dumps(config))

    return change


def put(name: str, content: str | bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, size: int) -> Damage:
    """size: bytes to keep, or to remove if negative."""
    return lambda model: os.truncate(model / name, len((model / name).read_bytes()[:size]))


def drop(name: str) -> Damage:
    return lambda model: (model / name).unlink()


def renamed(name: str) -> Damage:
    return lambda model: (model / "model.safetensors").rename(model / name)


def together(*damages: Damage) -> Damage:
    return lambda model: [damage(model) for damage in damages]


def as_loop(name: str) -> Damage:
    """A file that not even root can read: a link to itself."""
    return together(drop(name), lambda model: (model / name).symlink_to(model / name))


def indexed(index: object) -> Damage:
    """The weights in one shard, with this index."""
    text = index if isinstance(index, str) else json.dumps(index)
    return together(renamed(SHARD), put("model.safetensors.index.json", text))


def with_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """The weights after a changed header."""

    def damage(model: Path) -> None:
        file = model / "model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return damage


HEADERS: dict[str, tuple[Damage, str]] = {
    "no config": (drop("config.json"), "it has no config.json"),
    "a config cut short": (cut("config.json", 40), "download it again"),
    "a config that is a list": (put("config.json", "[]"), "must hold a JSON object"),
    "a config nested too deeply": (put("config.json", "[" * 100_000), "download it again"),
    "a config that cannot be read": (as_loop("config.json"), "config.json"),
    "no weights": (drop("model.safetensors"), "no safetensors weights"),
    "pickled weights": (renamed("pytorch_model.bin"), "save_pretrained"),
    "GGUF weights": (renamed("a.gguf"), "name that file"),
    "several weights and no index": (
        together(renamed("a.safetensors"), put("b.safetensors", "")),
        "download it again",
    ),
    "weights cut short": (cut("model.safetensors", -1000), "download it again"),
    "weights that are a web page": (put("model.safetensors", "<!DOCTYPE html><html>"), "download it again"),
    "weights that cannot be read": (as_loop("model.safetensors"), "model.safetensors"),
    "an index that leads elsewhere": (indexed({"weight_map": {NORM: "../a.safetensors"}}), "not a file name"),
}


@pytest.mark.parametrize(("kind", "command"), by_turns(HEADERS))
def test_damaged_headers(place: Place, command: str, kind: str) -> None:
    damage, expected = HEADERS[kind]
    damage(place.model)
    assert expected in complaint(call(*words(command, place.model)), 1)


# Found when the model is built, after torch is imported: a part of the error, and the exit code.
PARTS: dict[str, tuple[Damage, str, int]] = {
    "no model type": (rewrite(model_type=None), "config.json has no model_type", 1),
    "an unknown model type": (
        rewrite(model_type="perceptron"),
        "does not support the model type 'perceptron': for a new model type run `pip install --upgrade",
        1,
    ),
    "a model with code of its own": (
        rewrite(model_type="per\nceptron", auto_map={"AutoConfig": "own.Config"}),
        "does not support the model type 'per\\nceptron'; code shipped with a model is never run: for a new",
        1,
    ),
    "a model type that is a number": (rewrite(model_type=5), "config.json", 1),
    "a model that writes no text": (rewrite(model_type="vit"), "vit", 1),
    "no size": (rewrite(hidden_size="wide"), "config.json", 1),
    "another size": (rewrite(intermediate_size=64), "config.json", 1),
    "a word for a number": (rewrite(rms_norm_eps="small"), "'rms_norm_eps': ", 1),
    "layers of no kind": (rewrite(layer_types=["x", "y"]), "layer_types", 1),
    "more layers than there are": (rewrite(num_hidden_layers=9), "lack", 1),
    "no layers": (rewrite(num_hidden_layers=0), "layers", 1),
    "a smaller vocabulary": (rewrite(vocab_size=50), "config.json", 1),
    "an unknown quantization": (rewrite(quantization_config={"quant_method": "magic"}), "magic", 1),
    "no tokenizer": (drop("tokenizer.json"), "add tokenizer.json", 1),
    "a tokenizer cut short": (cut("tokenizer.json", 200), "cannot be read", 1),
    "a tokenizer that is a list": (put("tokenizer.json", "[]"), "cannot be read", 1),
    "a tokenizer configuration of garbage": (
        put("tokenizer_config.json", "{"),
        "tokenizer_config.json is not valid JSON",
        1,
    ),
    "a template that is no program": (put("chat_template.jinja", "{% for %}"), "chat template refuses", 2),
    "a template that fails": (
        put("chat_template.jinja", "{{ raise_exception('no') }}"),
        "chat template refuses",
        2,
    ),
    "a template that says nothing": (put("chat_template.jinja", "  "), "the prompt is empty", 2),
    "endings of garbage": (put("generation_config.json", "{"), "generation_config.json", 1),
    "weights that are missing": (with_header(lambda header: header.pop(NORM)), NORM, 1),
}


@pytest.mark.parametrize("kind", PARTS)
def test_damaged_parts(place: Place, kind: str) -> None:
    damage, expected, code = PARTS[kind]
    damage(place.model)
    assert expected in complaint(call(*words("generate", place.model), *ONE_TOKEN), code)


def test_unusable_drafts(place: Place) -> None:
    """An unknown family is named; a draft without a common token has a remedy."""
    unknown = Path(shutil.copytree(place.whole, place.root / "unknown"))
    rewrite(model_type="perceptron")(unknown)
    line = complaint(call(*words("generate", place.whole), "--draft", unknown), 1)
    assert f"the draft {unknown} cannot be used: the installed transformers" in line
    stranger = Path(shutil.copytree(place.whole, place.root / "stranger"))
    text = (stranger / "tokenizer.json").read_text()
    (stranger / "tokenizer.json").write_text(re.sub(r'"w(\d+)"', r'"v\1"', text))
    assert "--draft auto" in complaint(call(*words("generate", place.whole), "--draft", stranger), 1)


# Options with an intact model: the value, a part of the error, and the exit code.
OPTIONS: dict[str, list[tuple[str, str, int]]] = {
    "generate": [
        ("--max-tokens x", "it must be a whole number, not x", 2),
        ("--dtype int7", "'int7' is not one of", 2),
        ("--memory lots", "1.5GB", 2),
        ("--memory 12", "add a unit: 12GB", 2),
        ("--memory 10MB", "the minimum is", 1),
        ("--vram 1GB", "--memory", 2),
        ("--device cuda:0,cpu", "not auto, cpu or cuda", 2),
        ("--cpu-layers few", "number of layers", 2),
        ("--cpu-layers 1", "no NVIDIA GPU; omit --cpu-layers, which needs a GPU", 2),
        ("--experts cpu --cpu-layers 1 --device cuda", "--cpu-layers", 2),
        ("--context 1", "2 or above", 2),
        ("--context 100000", "context", 2),
        ("--draft-bits 5", "2, 3, 4 or 16", 2),
        ("--draft ,", "has an empty name", 2),
        ("--draft suffix,suffix", "name each source once", 2),
        ("--draft none,suffix", "--draft none cannot be combined", 2),
        ("--draft ./hollow", "is empty", 1),
        ("--draft suffix,./nowhere", "check the path", 1),
        ("--draft a/no-such-draft", "HF_HUB_OFFLINE", 1),
        ("--draft mtp", "no MTP module", 1),
        ("--temperature nan", "temperature must be 0 or above", 2),
        ("--draft-corpus ./nowhere", "does not exist", 2),
        ("--draft-corpus noise.bin", "other files in --draft-corpus", 2),
        ("--budget 0", "1 or above", 2),
        ("--plan .", "cannot read the plan", 1),
        ("--plan object.json", "not a plan", 1),
        ("--verify sequoia", "add --tree sequoia", 2),
        ("--verify sequoia --tree sequoia --draft suffix", "--verify coupled", 2),
        ("--check --verify sequoia --tree sequoia --temperature 1", "--verify coupled", 2),
        ("--top-p 0", "--top-p must be above 0", 2),
        ("--top-k -1", "--top-k must be 0", 2),
        ("--min-p 2", "--min-p must be between", 2),
        ("--repetition-penalty 0", "--repetition-penalty must be above 0", 2),
        ("--presence-penalty inf", "--presence-penalty must be", 2),
        ("--frequency-penalty nan", "--frequency-penalty must be", 2),
        ("--seed 99999999999999999999", "seed must be between", 2),
        ("--max-tokens 0", "--max-tokens must be 1", 2),
        ("--stop=", "stop must be", 2),
        ("--bad-words=", "--bad-words must be", 2),
        ("--no-repeat-ngram-size -1", "--no-repeat-ngram-size must be", 2),
        ("--min-tokens 999", "--min-tokens must be between", 2),
        ("--logit-bias five", "write them like 13=-2.5", 2),
        ("--logit-bias 5=nan", "--logit-bias must be", 2),
        ("--draft none --budget 1 --width 1 --logit-bias 100000=1", "logit_bias", 2),
        ("--allowed-token-ids 1-5", "write them like 13,198", 2),
        ("--draft none --budget 1 --width 1 --allowed-token-ids 100000", "allowed_token_ids", 2),
        ("--stop-token-ids 1,,2", "write them like 13,198", 2),
        ("--logprobs 3", "--json", 2),
        ("--logprobs -1 --json", "logprobs must be", 2),
        ("--raw --system x", "omit one of them", 2),
        ("--trace .", "name a file", 2),
        ("--trace /proc/trace.json", "/proc", 2),
        ("--bogus", "No such option", 2),
    ],
    "chat": [
        ("--session none-like-this", "there is no session", 1),
        ("--session=", "--resume continues", 2),
        ("--session a --resume", "omit --resume", 2),
        ("--session object.json", "not a session", 1),
        ("--session newer.json", "reads up to 2", 1),
        ("--plan ./nowhere.json", "cannot read the plan", 1),
        ("--budget some", "number of nodes", 2),
    ],
    "plan": [
        ("--memory -1GB", "1.5GB", 2),
        ("--draft auto,suffix", "--draft auto cannot be combined", 2),
        ("--temperature -1", "temperature must be 0 or above", 2),
        ("--prompts 100", "it must be at most 8, not 100", 2),
        ("--hardware rtx-9999", "presets are", 2),
        ("--hardware object.json", "not a hardware profile", 1),
        ("--hardware rtx-4090 --validate", "omit --hardware", 2),
        ("--prompts 0", "it must be 1 or above, not 0", 2),
        ("--width 4", "No such option", 2),
        ("--save ./nowhere/plan.json", "name another", 2),
        ("--save .", "not a regular file", 2),
        ("--save /proc/plan.json", "name another folder", 2),
    ],
    "pack": [
        ("", "--to nf4", 2),
        ("--to nf4 --verify", "omit --to", 2),
        ("--out out --verify", "omit --to, --out and --again", 2),
        ("--verify", "is not a pack", 1),
        ("--to nf4 --out /", "root of a disk", 2),
        ("--to nf4 --out /proc/pack", "--out", 1),
        ("--to nf4 --out empty.json", "--out", 2),
        ("--to nf4 --out object.json/pack", "--out", 1),
        ("--to nf4 --memory few", "1.5GB", 2),
        ("--to nf4 --out out", "row length divisible by 64", 1),
    ],
    "distill": [
        ("--out out", "--kind", 2),
        ("--kind mlp", "--out", 2),
        ("--kind mlp --out empty.json", "name another folder with --out", 2),
        ("--kind mlp --out /proc/head", "--out", 1),
        ("--kind mlp --out out --depth 0", "depth must be 1", 2),
        ("--kind mlp --out out --tokens 10", "not enough to train on", 2),
        ("--kind mlp --out out --tokens 2MB", "write it like 200k or 2M", 2),
        ("--kind mlp --out out --prompts empty.json", "has no prompts", 2),
        ("--kind mlp --out out --prompts noise.bin", "cannot read prompts", 2),
        ("--kind mlp --out out --prompts rows.jsonl", "prompt", 2),
        ("--kind mlp --out out --memory 10MB", "memory", 1),
    ],
}
WITHOUT_A_MODEL: list[tuple[str, str, int]] = [
    ("hardware 4080", "unknown hardware '4080'", 2),
    ("hardware rtx-4090 --again", "not 'rtx-4090'; omit one", 2),
    ("hardware rtx-4090 --path .", "--path", 2),
    ("hardware --path empty.json", "there is no folder", 2),
    ("hardware --path /proc --quiet", "--path", 1),
    ("doctor ./nowhere", "folder nowhere does not exist", 2),
    ("levitate", "No such command", 2),
    ("run demo", "`offspec chat demo` holds a conversation, `offspec generate demo PROMPT` answers once", 2),
    ("run", "`offspec chat MODEL`", 2),
    ("ls", "`offspec models` lists downloaded models", 2),
    ("help", "write `offspec --help`", 2),
    ("models remove org/model", "write `offspec models rm org/model`", 2),
    ("--bogus", "No such option", 2),
    ("generate", "Missing argument", 2),
    ("generate demo a b", "unexpected extra argument", 2),
]


@pytest.fixture
def files(place: Place) -> Place:
    """A place with the files that options name."""
    session: dict[str, Any] = {
        **{"offspec_session": 1, "id": "a", "title": "a", "model": "demo", "turns": 1, "system": None},
        **{"created": "2026-01-31T12:00:00Z", "updated": "2026-01-31T12:00:00Z", "params": {}},
        "messages": [],
    }
    (place.root / "hollow").mkdir()
    place.file("empty.json")
    place.file("object.json", "{}")
    place.file("noise.bin", GARBAGE)
    place.file("rows.jsonl", '{"prompt": 5}\n')
    place.file("newer.json", json.dumps(session | {"offspec_session": 99}))
    return place


@pytest.mark.parametrize(
    ("command", "given", "expected", "code"), [(name, *case) for name in OPTIONS for case in OPTIONS[name]]
)
def test_invalid_options(files: Place, command: str, given: str, expected: str, code: int) -> None:
    more = {"generate": ["w5"], "chat": ["--plain"]}.get(command, [])
    result = call(command, files.whole, *more, "--quiet", *given.split(), input="w5\n")
    assert expected in complaint(result, code)


@pytest.mark.parametrize(("line", "expected", "code"), WITHOUT_A_MODEL)
def test_invalid_commands(files: Place, line: str, expected: str, code: int) -> None:
    assert expected in complaint(call(*line.split()), code)


@pytest.mark.parametrize(
    ("prompt", "piped", "expected"),
    [
        (" \n\t ", None, "the prompt is empty"),
        (None, b"", "the prompt is empty"),
        ("-", b"\n\n", "the prompt is empty"),
        (None, "café".encode("latin-1"), "not UTF-8"),
        ("caf\udce9", None, "not valid Unicode"),
        ("w5 " * 200, None, "larger --context"),
    ],
    ids=["blanks", "the end of a pipe", "newlines", "another encoding", "half a character", "too long"],
)
def test_invalid_prompts(place: Place, prompt: str | None, piped: bytes | None, expected: str) -> None:
    given = [] if prompt is None else [prompt]
    settings = ["--quiet", "--context", "128", *ONE_TOKEN]
    assert expected in complaint(call("generate", place.whole, *given, *settings, input=piped), 2)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("OFFSPEC_KERNELS", "fast", 2),
        ("OFFSPEC_KERNELS", "triton", 2),  # an option for a GPU
        ("OFFSPEC_CACHE", "/proc/cache", 1),
        ("OFFSPEC_CACHE", "empty.json", 1),
    ],
)
def test_invalid_environment_variables(
    files: Place, name: str, value: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    quantize = ["--quantize", "nf4"] if name == "OFFSPEC_CACHE" else []
    assert name in complaint(call("generate", files.whole, "w5", "--quiet", *ONE_TOKEN, *quantize), code)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "."])
def test_unreadable_files(place: Place, name: str) -> None:
    (place.model / name).chmod(0)
    try:
        assert "model" in complaint(call(*words("generate", place.model)), 1)
    finally:
        (place.model / name).chmod(0o700)


EARLY = [
    "generate ./nowhere hi",
    "generate DAMAGED hi",
    "generate NOISE hi",
    "generate WHOLE hi --draft ./nowhere",
    "generate WHOLE hi --plan ./nowhere",
    "generate WHOLE hi --draft-corpus NOISE",
    "generate WHOLE hi --trace ./nowhere/trace.json",
    "chat ./nowhere --plain",
    "chat WHOLE --session nothing",
    "serve ./nowhere --port 0",
    "bench ./nowhere",
    "plan ./nowhere",
    "plan WHOLE --hardware ./nowhere",
    "plan WHOLE --save ./nowhere/plan.json",
    "pack ./nowhere --to nf4",
    "pack ./nowhere --verify",
    "distill ./nowhere --kind mlp --out out",
    "distill WHOLE --kind mlp --out out --tokens 10",
    "distill WHOLE --kind mlp --out out --prompts ./nowhere",
    "hardware rtx-9999",
    "doctor ./nowhere",
]
PROGRAM = """
import sys
from offspec.ui.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["offspec", *line.split()]
    try:
        main()
    except SystemExit as left:
        heavy = [name for name in "torch transformers huggingface_hub textual".split() if name in sys.modules]
        print(line, left.code, *heavy, sep="|")
"""


def test_wrong_paths_do_not_wait_for_torch(place: Place) -> None:
    cut("config.json", 40)(place.model)
    paths = {"DAMAGED": place.model, "WHOLE": place.whole, "NOISE": place.file("noise.bin", GARBAGE)}
    lines = [re.sub("[A-Z]{5,}", lambda word: str(paths[word[0]]), line) for line in EARLY]
    shown = run("-c", PROGRAM, *lines)
    assert len(shown.stderr.splitlines()) == len(lines), shown.stderr
    for line, said in zip(lines, shown.stdout.splitlines(), strict=True):
        assert said in (f"{line}|1", f"{line}|2")
