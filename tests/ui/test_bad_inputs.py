"""What users get wrong, some 250 kinds of it: one line that names the remedy, and no traceback.

Each case calls the program in this process, with a tiny model that the case may have damaged. Where nothing
but a path or an option is wrong, the line comes before torch is imported; the last test looks at that in a
process of its own.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from tests.support.tiny_models import write_model
from tests.ui.cli.program import run

GARBAGE = b"\x00\xff\xfe garbage \x80" * 40
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


class Place(NamedTuple):
    """A folder for one case, with a model that may be damaged and one that is whole."""

    root: Path
    whole: Path

    @property
    def model(self) -> Path:
        """A copy, made when it is first asked for."""
        folder = self.root / "model"
        if not folder.exists():
            shutil.copytree(self.whole, folder)
        return folder

    def file(self, name: str, content: str | bytes = "") -> Path:
        """A file of this content, in folders that are made."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def folder(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True)
        return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OFFSPEC_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    yield Place(tmp_path, whole)


def call(*args: object, input: str | bytes | None = None) -> Result:
    from offspec.ui.cli.main import app

    return CliRunner().invoke(app, list(map(str, args)), input=input, prog_name="offspec")


def complaint(result: Result, code: int) -> str:
    """The only line on stderr, wrapping undone, after checking exit code, stdout and that nothing broke."""
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


# What each command is called with, the model in front.
COMMANDS: dict[str, Callable[[object, Place], list[object]]] = {
    "generate": lambda model, place: ["generate", model, "w5", "--quiet", "--max-tokens", "2"],
    "chat": lambda model, place: ["chat", model, "--plain", "--quiet"],
    "plan": lambda model, place: ["plan", model, "--quiet"],
    "pack": lambda model, place: ["pack", model, "--to", "nf4", "--out", place.root / "out", "--quiet"],
    "distill": lambda model, place: [
        *("distill", model, "--kind", "medusa", "--out", place.root / "out", "--quiet"),
        *("--tokens", "1000"),
    ],
}

# Names of models that name none, and what the line says of it.
NAMES: dict[str, tuple[Callable[[Place], object], str]] = {
    "nothing": (lambda place: "", "no model was named"),
    "blanks": (lambda place: "  ", "no model was named"),
    "a word": (lambda place: "smollm", "organisation/smollm"),
    "a path that is not there": (lambda place: place.root / "nowhere", "check the path"),
    "a relative path": (lambda place: "./nowhere/model", "check the path"),
    "a home that is not there": (lambda place: "~nobody/model", "check the path"),
    "a file that is not there": (lambda place: place.root / "model.gguf", "check the path"),
    "a name with a NUL": (lambda place: "model\0", "there is no model"),
    "a name that is too long": (lambda place: "/" + "m" * 5000, "check the path"),
    "a link to nothing": (lambda place: linked(place), "check the path"),
    "an empty folder": (lambda place: place.folder("empty"), "is empty"),
    "a folder of something else": (
        lambda place: place.file("other/readme.txt", "hi").parent,
        "no config.json",
    ),
    "a folder of GGUF files": (lambda place: place.file("ggufs/a.gguf", "hi").parent, "name one of them"),
    "a folder with an adapter": (
        lambda place: place.file("lora/adapter_config.json", "{}").parent,
        "merge it",
    ),
    "a weights file": (lambda place: place.model / "model.safetensors", "name its folder"),
    "a text file": (lambda place: place.file("model.txt", "hi"), "is not a model"),
    "a configuration": (lambda place: place.model / "config.json", "has no weights and is not a model"),
    "an empty GGUF file": (lambda place: place.file("empty.gguf"), "empty.gguf"),
    "a GGUF file of garbage": (lambda place: place.file("bad.gguf", GARBAGE), "bad.gguf"),
    "a GGUF file of text": (
        lambda place: place.file("text.gguf", "hello, I am no model at all"),
        "text.gguf",
    ),
    "a GGUF file cut short": (lambda place: place.file("cut.gguf", b"GGUF\x03\0\0\0"), "cut.gguf"),
    "a GGUF file to come": (lambda place: place.file("new.gguf", b"GGUF\x63" + bytes(99)), "new.gguf"),
    "a device": (lambda place: "/dev/null", "check the path"),
}


def linked(place: Place) -> Path:
    (place.root / "link").symlink_to(place.root / "gone")
    return place.root / "link"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", NAMES)
def test_names_that_are_no_model(place: Place, command: str, kind: str) -> None:
    name, told = NAMES[kind]
    args = COMMANDS[command](name(place), place)
    if (command, kind) == ("plan", "a configuration"):
        args.append("--validate")  # a plan is made of it
    assert told in complaint(call(*args), 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hub_id_without_a_network(place: Place, command: str) -> None:
    line = complaint(call(*COMMANDS[command]("organisation/no-such-model", place)), 1)
    assert "HF_HUB_OFFLINE is set" in line and "unset it" in line


def rewrite(model: Path, **changes: Any) -> None:
    """Change config.json; None takes a key away."""
    config = json.loads((model / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (model / "config.json").write_text(json.dumps(config))


def put(name: str, content: str | bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, size: int) -> Damage:
    """size: bytes that are left, or are taken away where it is below 0."""
    return lambda model: os.truncate(model / name, len((model / name).read_bytes()[:size]))


def drop(name: str) -> Damage:
    return lambda model: (model / name).unlink()


def together(*damages: Damage) -> Damage:
    return lambda model: [damage(model) for damage in damages]


def as_folder(name: str) -> Damage:
    return together(drop(name), lambda model: (model / name).mkdir())


def as_loop(name: str) -> Damage:
    """A file that nobody can read, not even root: a link to itself."""
    return together(drop(name), lambda model: (model / name).symlink_to(model / name))


def indexed(weight_map: object) -> Damage:
    """The weights in one shard, with an index that says this."""

    def change(model: Path) -> None:
        (model / "model.safetensors").rename(model / SHARD)
        (model / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps(weight_map))

    return change


def with_header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """The weights behind a header that was changed."""

    def damage(model: Path) -> None:
        file = model / "model.safetensors"
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return damage


def first(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of some tensor."""
    entry: dict[str, Any] = header[next(name for name in header if name.endswith("q_proj.weight"))]
    return entry


NORM = "model.norm.weight"
HEADERS: dict[str, tuple[Damage, str]] = {
    "no config": (drop("config.json"), "it has no config.json"),
    "an empty config": (put("config.json", ""), "download it again"),
    "a config cut short": (cut("config.json", 40), "download it again"),
    "a config of garbage": (put("config.json", GARBAGE), "download it again"),
    "a config that is a list": (put("config.json", "[]"), "must hold a JSON object"),
    "a config nested too deeply": (put("config.json", "[" * 100_000), "download it again"),
    "a config that is a folder": (as_folder("config.json"), "config.json"),
    "a config that cannot be read": (as_loop("config.json"), "config.json"),
    "no weights": (drop("model.safetensors"), "no safetensors weights"),
    "pickled weights": (
        lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
        "save_pretrained",
    ),
    "GGUF weights": (lambda model: (model / "model.safetensors").rename(model / "a.gguf"), "name that file"),
    "several weights and no index": (
        together(drop("model.safetensors"), put("a.safetensors", ""), put("b.safetensors", "")),
        "download it again",
    ),
    "empty weights": (cut("model.safetensors", 0), "model.safetensors"),
    "weights cut in their header": (cut("model.safetensors", 100), "model.safetensors"),
    "weights cut short": (cut("model.safetensors", -1000), "download it again"),
    "weights of garbage": (put("model.safetensors", GARBAGE), "model.safetensors"),
    "weights that are a page of a browser": (
        put("model.safetensors", "<!DOCTYPE html><html>"),
        "download it again",
    ),
    "weights that Git LFS did not fetch": (
        put("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "git lfs pull",
    ),
    "weights that are a folder": (as_folder("model.safetensors"), "model.safetensors"),
    "weights that cannot be read": (as_loop("model.safetensors"), "model.safetensors"),
    "a header that lies of places": (
        with_header(lambda header: first(header).update(data_offsets=[10**9, 2 * 10**9])),
        "model.safetensors",
    ),
    "a header that lies of shapes": (
        with_header(lambda header: first(header).update(shape=[3, 3])),
        "q_proj",
    ),
    "a header with an unknown type": (with_header(lambda header: first(header).update(dtype="X9")), "X9"),
    "an index that is not JSON": (indexed("{"), "download it again"),
    "an index without a map": (indexed({}), "has no weight_map"),
    "an index with an empty map": (indexed({"weight_map": {}}), "has no weight_map"),
    "an index that names no shard": (indexed({"weight_map": {NORM: 5}}), "download it again"),
    "an index that leads elsewhere": (indexed({"weight_map": {NORM: "../a.safetensors"}}), "no file name"),
    "an index with a shard too many": (
        indexed({"weight_map": {NORM: "b.safetensors"}}),
        "lacks b.safetensors",
    ),
    "an index with a tensor too many": (indexed({"weight_map": {"more": SHARD}}), "lacks tensor 'more'"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_damaged_headers(place: Place, kind: str) -> None:
    """The model of generate, and in turn that of one other command."""
    damage, told = HEADERS[kind]
    damage(place.model)
    others = [name for name in COMMANDS if name != "generate"]
    for command in ("generate", others[list(HEADERS).index(kind) % len(others)]):
        assert told in complaint(call(*COMMANDS[command](place.model, place)), 1)


# Found when the model is made of its parts, after torch is imported.
PARTS: dict[str, tuple[Damage, str]] = {
    "no model type": (lambda model: rewrite(model, model_type=None), "config.json has no model_type"),
    "an unknown model type": (
        lambda model: rewrite(model, model_type="perceptron"),
        "does not know the model type 'perceptron': for a new family run `pip install --upgrade",
    ),
    "a model with code of its own": (
        lambda model: rewrite(model, model_type="per\nceptron", auto_map={"AutoConfig": "own.Config"}),
        "does not know the model type 'per\\nceptron'; code that comes with a model is never run: for a new",
    ),
    "a model type that is a number": (lambda model: rewrite(model, model_type=5), "config.json"),
    "a model that writes no text": (lambda model: rewrite(model, model_type="vit"), "vit"),
    "no size": (lambda model: rewrite(model, hidden_size="wide"), "config.json"),
    "another size": (lambda model: rewrite(model, intermediate_size=64), "config.json"),
    "a size below 0": (lambda model: rewrite(model, hidden_size=-32), "config.json"),
    "heads that do not divide": (lambda model: rewrite(model, num_attention_heads=0), "sizes is 0"),
    "no heads of keys": (lambda model: rewrite(model, num_key_value_heads=0), "sizes is 0"),
    "a word for a number": (lambda model: rewrite(model, rms_norm_eps="small"), "'rms_norm_eps': "),
    "layers of no kind": (lambda model: rewrite(model, layer_types=["x", "y"]), "layer_types"),
    "more layers than there are": (lambda model: rewrite(model, num_hidden_layers=9), "lack"),
    "no layers": (lambda model: rewrite(model, num_hidden_layers=0), "layers"),
    "a smaller vocabulary": (lambda model: rewrite(model, vocab_size=50), "config.json"),
    "an unknown quantisation": (
        lambda model: rewrite(model, quantization_config={"quant_method": "magic"}),
        "magic",
    ),
    "no tokenizer": (drop("tokenizer.json"), "add tokenizer.json"),
    "an empty tokenizer": (put("tokenizer.json", ""), "holds no tokenizer"),
    "a tokenizer cut short": (cut("tokenizer.json", 200), "holds no tokenizer"),
    "a tokenizer of garbage": (put("tokenizer.json", GARBAGE), "holds no tokenizer"),
    "a tokenizer that is a list": (put("tokenizer.json", "[]"), "holds no tokenizer"),
    "a tokenizer configuration of garbage": (
        put("tokenizer_config.json", "{"),
        "tokenizer_config.json is not JSON",
    ),
    "a template that is no program": (put("chat_template.jinja", "{% for %}"), "chat template refuses"),
    "a template that fails": (
        put("chat_template.jinja", "{{ raise_exception('no') }}"),
        "chat template refuses",
    ),
    "a template that says nothing": (put("chat_template.jinja", "  "), "the prompt is empty"),
    "endings of garbage": (put("generation_config.json", "{"), "generation_config.json"),
    "weights that are missing": (with_header(lambda header: header.pop(NORM)), NORM),
}
REQUESTS = ("a template that is no program", "a template that fails", "a template that says nothing")


@pytest.mark.parametrize("kind", PARTS)
def test_damaged_parts(place: Place, kind: str) -> None:
    damage, told = PARTS[kind]
    damage(place.model)
    args = [*COMMANDS["generate"](place.model, place), "--draft", "none", "--budget", "1", "--width", "1"]
    assert told in complaint(call(*args), 2 if kind in REQUESTS else 1)


def test_a_draft_of_an_unknown_family_is_named(place: Place) -> None:
    draft = shutil.copytree(place.model, place.root / "other")
    rewrite(draft, model_type="perceptron")
    line = complaint(call(*COMMANDS["generate"](place.model, place), "--draft", draft), 1)
    assert f"the draft {draft} cannot be used: the installed transformers" in line


# Options beside a model that is whole: what is given, what the line says, and its exit code.
OPTIONS: list[tuple[str, str, int]] = [
    ("--memory lots", "1.5GB", 2),
    ("--memory -1GB", "1.5GB", 2),
    ("--memory 0", "above 0", 2),
    ("--memory 12GHz", "1.5GB", 2),
    ("--memory 12", "write 12GB", 2),
    ("--vram 8192", "write 8192MB", 2),
    ("--memory 10MB", "least that would do", 1),
    ("--vram much", "1.5GB", 2),
    ("--vram 1GB", "--memory", 2),
    ("--device tpu", "not auto, cpu or cuda", 2),
    ("--device cuda:0,cpu", "not auto, cpu or cuda", 2),
    ("--cpu-layers few", "number of layers", 2),
    ("--cpu-layers 1", "no NVIDIA GPU; leave out --cpu-layers", 2),
    ("--experts some", "gpu", 2),
    ("--experts cpu --cpu-layers 1 --device cuda", "--cpu-layers", 2),
    ("--dtype int3", "bfloat16", 2),
    ("--context 1", "2 or above", 2),
    ("--context many", "integer", 2),
    ("--context 100000", "context", 2),
    ("--kv-cache int3", "int8", 2),
    ("--draft-bits 5", "2, 3, 4 or 16", 2),
    ("--draft-bits few", "integer", 2),
    ("--draft substitute --draft-bits 16", "leave out --draft-bits", 2),
    ("--draft ,", "a name is missing", 2),
    ("--draft suffix,,lookup", "a name is missing", 2),
    ("--draft suffix,suffix", "once is enough", 2),
    ("--draft auto,suffix", "--draft auto stands alone", 2),
    ("--draft none,suffix", "--draft none stands alone", 2),
    ("--draft ./nowhere", "check the path", 1),
    ("--draft nothing", "organisation/nothing", 1),
    ("--draft suffix,./nowhere", "check the path", 1),
    ("--draft a/no-such-draft", "HF_HUB_OFFLINE", 1),
    ("--draft ./hollow", "is empty", 1),
    ("--draft ./ggufs", "name one of them", 1),
    ("--draft noise.bin", "noise.bin", 1),
    ("--draft empty.json", "empty.json", 1),
    ("--draft mtp", "no MTP module", 1),
    ("--temperature -1", "temperature must be 0 or above", 2),
    ("--temperature nan", "temperature must be 0 or above", 2),
    ("--temperature hot", "valid number", 2),
]
GENERATE: list[tuple[str, str, int]] = [
    *OPTIONS,
    ("--quantize int3", "nf4", 2),
    ("--draft-corpus ./nowhere", "does not exist", 2),
    ("--cache-size much", "cannot read 'much'", 2),
    ("--draft-corpus noise.bin", "other files in --draft-corpus", 2),
    ("--budget 0", "1 or above", 2),
    ("--budget -5", "number of nodes", 2),
    ("--budget some", "number of nodes", 2),
    ("--width 0", "1 or above", 2),
    ("--width wide", "number of nodes", 2),
    ("--tree flat", "dynamic", 2),
    ("--plan ./nowhere.json", "cannot read the plan", 1),
    ("--plan .", "cannot read the plan", 1),
    ("--plan noise.bin", "cannot read the plan", 1),
    ("--plan empty.json", "not a plan", 1),
    ("--plan object.json", "not a plan", 1),
    ("--verify hope", "coupled", 2),
    ("--verify sequoia", "add --tree sequoia", 2),
    ("--verify sequoia --tree sequoia --draft suffix", "--verify coupled", 2),
    ("--top-p 0", "--top-p must be above 0", 2),
    ("--top-p 2", "--top-p must be above 0", 2),
    ("--top-k -1", "--top-k must be 0", 2),
    ("--top-k many", "integer", 2),
    ("--min-p 2", "--min-p must be between", 2),
    ("--repetition-penalty 0", "--repetition-penalty must be above 0", 2),
    ("--presence-penalty inf", "--presence-penalty must be", 2),
    ("--frequency-penalty nan", "--frequency-penalty must be", 2),
    ("--seed -1", "seed must be between", 2),
    ("--seed 99999999999999999999", "seed must be between", 2),
    ("--max-tokens 0", "--max-tokens must be 1", 2),
    ("--max-tokens 1.5", "integer", 2),
    ("--stop=", "stop must be", 2),
    ("--bogus", "No such option", 2),
]
RULES: list[tuple[str, str, int]] = [
    ("--min-tokens 999", "--min-tokens must be between", 2),
    ("--bad-words=", "--bad-words must be", 2),
    ("--no-repeat-ngram-size -1", "--no-repeat-ngram-size must be", 2),
    ("--logit-bias five", "write them like 13=-2.5", 2),
    ("--logit-bias 5=nan", "--logit-bias must be", 2),
    ("--draft none --budget 1 --width 1 --logit-bias 100000=1", "logit_bias", 2),
    ("--allowed-token-ids a", "write them like 13,198", 2),
    ("--draft none --budget 1 --width 1 --allowed-token-ids 100000", "allowed_token_ids", 2),
    ("--stop-token-ids 1,,2", "write them like 13,198", 2),
    ("--logprobs 3", "--json", 2),
    ("--logprobs -1 --json", "logprobs must be", 2),
    ("--raw --system x", "leave out one of them", 2),
    ("--check --verify sequoia --tree sequoia --temperature 1", "--verify coupled", 2),
    ("--trace ./nowhere/trace.json", "nowhere", 2),
    ("--trace .", "name a file", 2),
    ("--trace /proc/trace.json", "/proc", 2),
]
CHAT: list[tuple[str, str, int]] = [
    ("--session none-like-this", "there is no session", 1),
    ("--session=", "--resume continues", 2),
    ("--session a --resume", "leave out --resume", 2),
    ("--session empty.json", "not a session", 1),
    ("--session object.json", "not a session", 1),
    ("--session noise.bin", "cannot read the session", 1),
    ("--session newer.json", "reads up to 2", 1),
    ("--session turned.json", "take turns", 1),
    ("--session typed.json", "temperature", 1),
]
PLAN: list[tuple[str, str, int]] = [
    *OPTIONS,
    ("--hardware rtx-9999", "presets are", 2),
    ("--hardware ./nowhere.json", "presets are", 2),
    ("--hardware empty.json", "no hardware profile", 1),
    ("--hardware object.json", "no hardware profile", 1),
    ("--hardware noise.bin", "no hardware profile", 1),
    ("--hardware .", "presets are", 2),
    ("--hardware rtx-4090 --validate", "leave out --hardware", 2),
    ("--prompts 0", "greater than", 2),
    ("--prompts 100", "less than", 2),
    ("--save ./nowhere/plan.json", "name another", 2),
    ("--save .", "name a file", 2),
    ("--save /proc/plan.json", "name another folder", 2),
]
PACK: list[tuple[str, str, int]] = [
    ("", "--to nf4", 2),
    ("--to int3", "nf4", 2),
    ("--to nf4 --verify", "leave out --to", 2),
    ("--out out --verify", "leave out --to", 2),
    ("--verify", "is no pack", 1),
    ("--to nf4 --out /", "root of a disk", 2),
    ("--to nf4 --out /proc/pack", "--out", 1),
    ("--to nf4 --out empty.json", "--out", 2),
    ("--to nf4 --out object.json/pack", "--out", 1),
    ("--to nf4 --memory few", "1.5GB", 2),
    ("--to nf4 --out out", "whole groups of 64", 1),
]
DISTILL: list[tuple[str, str, int]] = [
    ("--out out", "--kind", 2),
    ("--kind medusa", "--out", 2),
    ("--kind hydra --out out", "medusa", 2),
    ("--kind mlp --out empty.json", "name another folder with --out", 2),
    ("--kind mlp --out /proc/head", "--out", 1),
    ("--kind mlp --out out --depth 0", "depth must be 1", 2),
    ("--kind mlp --out out --tokens few", "200k or 2M", 2),
    ("--kind mlp --out out --tokens 10", "--tokens 1000", 2),
    ("--kind mlp --out out --prompts ./nowhere", "cannot read prompts", 2),
    ("--kind mlp --out out --prompts .", "cannot read prompts", 2),
    ("--kind mlp --out out --prompts empty.json", "holds no prompts", 2),
    ("--kind mlp --out out --prompts noise.bin", "cannot read prompts", 2),
    ("--kind mlp --out out --prompts rows.jsonl", "prompt", 2),
    ("--kind mlp --out out --length 1", "length must be 16", 2),
    ("--kind mlp --out out --epochs 0", "epochs must be 1", 2),
    ("--kind mlp --out out --minutes 0", "minutes must be above 0", 2),
    ("--kind mlp --out out --memory few", "1.5GB", 2),
    ("--kind mlp --out out --memory 10MB", "memory", 1),
    ("--kind mlp --out out --device tpu", "not auto, cpu or cuda", 2),
    ("--kind mlp --out out --dtype int3", "bfloat16", 2),
]
WITHOUT_A_MODEL: list[tuple[str, str, int]] = [
    ("hardware rtx-9999", "presets are", 2),
    ("hardware empty.json", "no hardware profile", 1),
    ("hardware object.json", "no hardware profile", 1),
    ("hardware noise.bin", "no hardware profile", 1),
    ("hardware .", "presets are", 2),
    ("hardware rtx-4090 --again", "leave out 'rtx-4090'", 2),
    ("hardware --path ./nowhere", "there is no folder", 2),
    ("hardware --path empty.json", "there is no folder", 2),
    ("hardware --path /proc --quiet", "--path", 1),
    ("hardware --device tpu", "not auto, cpu or cuda", 2),
    ("hardware a b", "unexpected extra argument", 2),
    ("doctor ./nowhere", "there is no folder", 2),
    ("doctor empty.json", "there is no folder", 2),
    ("doctor --fix", "No such option", 2),
    ("hardware 4080", "unknown hardware '4080'", 2),
    ("levitate", "No such command", 2),
    ("run demo", "`offspec chat demo` holds a conversation, `offspec generate demo PROMPT` answers once", 2),
    ("run", "`offspec chat MODEL`", 2),
    ("pull org/model-GGUF:Q4_K_M --quiet", "write `offspec models pull org/model-GGUF:Q4_K_M`", 2),
    ("list", "`offspec models` lists what is downloaded", 2),
    ("ls", "`offspec models`", 2),
    ("rm org/model", "write `offspec models rm org/model`", 2),
    ("show org/model", "write `offspec plan org/model`", 2),
    ("server org/model", "write `offspec serve org/model`", 2),
    ("help", "write `offspec --help`", 2),
    ("help plan", "write `offspec plan --help`", 2),
    ("version", "write `offspec --version`", 2),
    ("models list", "write `offspec models`", 2),
    ("models remove org/model", "write `offspec models rm org/model`", 2),
    ("--bogus", "No such option", 2),
    ("generate", "Missing argument", 2),
    ("chat", "Missing argument", 2),
    ("plan", "Missing argument", 2),
    ("pack", "Missing argument", 2),
    ("distill", "Missing argument", 2),
    ("generate demo a b", "unexpected extra argument", 2),
]
SESSION: dict[str, Any] = {
    **{"offspec_session": 1, "id": "a", "title": "a", "model": "demo", "turns": 1, "system": None},
    **{"created": "2026-01-31T12:00:00Z", "updated": "2026-01-31T12:00:00Z", "params": {}},
}


@pytest.fixture
def files(place: Place) -> Place:
    """With the files that options name."""
    place.folder("hollow")
    place.file("ggufs/a.gguf", "hi")
    place.file("empty.json")
    place.file("object.json", "{}")
    place.file("noise.bin", GARBAGE)
    place.file("rows.jsonl", '{"prompt": 5}\n')
    turns = [{"role": "assistant", "content": "hi"}]
    place.file("newer.json", json.dumps({**SESSION, "offspec_session": 99, "messages": []}))
    place.file("turned.json", json.dumps({**SESSION, "messages": turns}))
    place.file("typed.json", json.dumps({**SESSION, "params": {"temperature": "hot"}, "messages": []}))
    return place


ALL = [
    *(("generate", *case) for case in (*GENERATE, *RULES)),
    *(("chat", *case) for case in (*CHAT, *GENERATE[:: len(GENERATE) // 12])),
    *(("plan", *case) for case in PLAN),
    *(("pack", *case) for case in PACK),
    *(("distill", *case) for case in DISTILL),
]


@pytest.mark.parametrize(("command", "given", "told", "code"), ALL)
def test_wrong_options(files: Place, command: str, given: str, told: str, code: int) -> None:
    model: dict[str, list[object]] = {
        "generate": [files.whole, "w5"],
        "chat": [files.whole, "--plain"],
    }
    args = [*model.get(command, [files.whole]), "--quiet", *given.split()]
    assert told in complaint(call(command, *args, input="w5\n" if command == "chat" else None), code)


@pytest.mark.parametrize(("line", "told", "code"), WITHOUT_A_MODEL)
def test_wrong_commands(files: Place, line: str, told: str, code: int) -> None:
    assert told in complaint(call(*line.split()), code)


PROMPTS: dict[str, tuple[str | None, bytes | None, str]] = {
    "nothing": ("", None, "the prompt is empty"),
    "blanks": (" \n\t ", None, "the prompt is empty"),
    "the end of a pipe": (None, b"", "the prompt is empty"),
    "a pipe of newlines": ("-", b"\n\n", "the prompt is empty"),
    "another encoding": (None, "café".encode("latin-1"), "not UTF-8"),
    "a binary file": ("-", GARBAGE, "not UTF-8"),
    "half of a character": ("caf\udce9", None, "not valid Unicode"),
    "more than the context": ("w5 " * 200, None, "larger --context"),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_wrong_prompts(place: Place, kind: str) -> None:
    prompt, piped, told = PROMPTS[kind]
    words = [] if prompt is None else [prompt]
    settings = ["--quiet", "--context", "128", "--draft", "none", "--budget", "1", "--width", "1"]
    assert told in complaint(call("generate", place.whole, *words, *settings, input=piped), 2)


VARIABLES: dict[str, tuple[str, str, str, int]] = {
    "an unknown kernel": ("OFFSPEC_KERNELS", "fast", "OFFSPEC_KERNELS", 2),
    "a kernel for a GPU": ("OFFSPEC_KERNELS", "triton", "OFFSPEC_KERNELS", 2),
    "a cache that cannot be made": ("OFFSPEC_CACHE", "/proc/cache", "OFFSPEC_CACHE", 1),
    "a cache that is a file": ("OFFSPEC_CACHE", "empty.json", "OFFSPEC_CACHE", 1),
}


@pytest.mark.parametrize("kind", VARIABLES)
def test_wrong_variables(files: Place, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value, told, code = VARIABLES[kind]
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    quantize = ["--quantize", "nf4"] if name == "OFFSPEC_CACHE" else []
    args = ["--quiet", "--draft", "none", "--budget", "1", "--width", "1", *quantize]
    assert told in complaint(call("generate", files.whole, "w5", *args), code)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "."])
def test_files_that_may_not_be_read(place: Place, name: str) -> None:
    (place.model / name).chmod(0)
    try:
        assert "model" in complaint(call(*COMMANDS["generate"](place.model, place)), 1)
    finally:
        (place.model / name).chmod(0o700)


def test_a_draft_that_shares_no_token(place: Place, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(place.whole, tmp_path / "draft"))
    text = (draft / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(re.sub(r'"w(\d+)"', r'"v\1"', text))
    line = complaint(call("generate", place.whole, "w5", "--draft", draft, "--quiet"), 1)
    assert "--draft auto" in line


EARLY = [
    "generate ./nowhere hi",
    "generate nothing hi",
    "generate DAMAGED hi",
    "generate NOISE hi",
    "generate WHOLE hi --draft ./nowhere",
    "generate WHOLE hi --plan ./nowhere",
    "generate WHOLE hi --draft-corpus NOISE",
    "generate WHOLE hi --trace ./nowhere/trace.json",
    "chat ./nowhere --plain",
    "chat WHOLE --session nothing",
    "plan ./nowhere",
    "plan WHOLE --hardware ./nowhere",
    "pack ./nowhere --to nf4",
    "pack ./nowhere --verify",
    "distill ./nowhere --kind mlp --out out",
    "distill WHOLE --kind mlp --out out --tokens 10",
    "distill WHOLE --kind mlp --out out --prompts ./nowhere",
    "hardware rtx-9999",
    "hardware --path ./nowhere",
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
