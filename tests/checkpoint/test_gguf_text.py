"""Tokenizer of a GGUF file."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from offspec.checkpoint.gguf import tokenizer
from offspec.core.events import Notice
from tests.support.gguf_files import UnpackEnvironment, write_gguf
from tests.support.versions import needs_transformers

pytestmark = needs_transformers("5.18")


def test_tokenizer_and_chat_template(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")
    tokenizer = AutoTokenizer.from_pretrained(bench.open().folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert tokenizer("AB</s>!!")["input_ids"] == [4 + 32, 4 + 33, 2, 3]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "AB"}], tokenize=False)
    assert text == "AB</s>"


def test_end_of_turn_tokens(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    def ends(**keys: Any) -> Any:
        write_gguf(bench.file, llama, "llama", keys={key.replace("__", "."): v for key, v in keys.items()})
        return json.loads((bench.open().folder / "generation_config.json").read_text())["eos_token_id"]

    assert ends() == 2
    assert ends(tokenizer__ggml__eot_token_id=5) == [2, 5]
    assert ends(tokenizer__ggml__eot_token_id=2) == 2
    tokens = ["<pad>", "<s>", "</s>", "!!", "<|im_end|>", *map(chr, range(34, 125))]
    kinds = [3, 3, 3, 1, 3] + [1] * 91
    extra = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": kinds}
    merges = {"tokenizer__ggml__merges": ["# #"]}
    tokens[3] = "##"
    assert ends(**extra, **merges) == 2  # the template does not use it
    assert ends(**extra, **merges, tokenizer__chat_template="x<|im_end|>") == [2, 4]


def test_digits_are_separate_tokens_if_the_model_requires_it(
    bench: UnpackEnvironment, llama: PreTrainedModel
) -> None:
    merges = {"tokenizer.ggml.merges": ["1 2"]}
    tokens = ["<pad>", "<s>", "</s>", "12", *map(chr, range(33, 125))]
    keys = {"tokenizer.ggml.tokens": tokens, **merges}
    write_gguf(bench.file, llama, "llama", keys=keys)
    assert AutoTokenizer.from_pretrained(bench.open().folder)("12")["input_ids"] == [3]
    write_gguf(bench.file, llama, "llama", keys={**keys, "tokenizer.ggml.pre": "smollm"})
    assert len(AutoTokenizer.from_pretrained(bench.open().folder)("12")["input_ids"]) == 2
    write_gguf(bench.file, llama, "llama", keys={**keys, "tokenizer.ggml.pre": "unheard-of"})
    bench.open()
    assert any(isinstance(event, Notice) and "'unheard-of'" in event.text for event in bench.events)


def test_sentencepiece_vocabulary(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    pieces = ["<unk>", "<s>", "</s>", "▁", "h", "i", "▁h", "hi", "▁hi"]
    pieces += [f"<0x{byte:02X}>" for byte in range(96 - len(pieces))]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -1.0, -2.0, -0.5] + [-99.0] * (96 - 9),
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 6 + [6] * (96 - 9),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_gguf(bench.file, llama, "llama", keys=keys)
    tokenizer = AutoTokenizer.from_pretrained(bench.open().folder)
    assert tokenizer("hi hi")["input_ids"] == [1, 8, 8]
    assert tokenizer("hi", add_special_tokens=False)["input_ids"] == [8]
    assert tokenizer.decode([1, 8, 8], skip_special_tokens=True) == "hi hi"


def test_older_transformers(
    bench: UnpackEnvironment, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(bench.file, llama, "llama")
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "installed_version", lambda name: "5.17.0")
        bench.open()
    told = [event.text for event in bench.events if isinstance(event, Notice)]
    assert any("tiny.gguf" in said and "update transformers to 5.18" in said for said in told)
    bench.open()
    assert not any("update transformers" in str(event) for event in bench.events)
    assert len(bench.cached_names()) == 2


def test_sampling_defaults(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    """Read the keys that llama.cpp's converter copies from generation_config.json."""

    def generation(**keys: Any) -> dict[str, Any]:
        write_gguf(bench.file, llama, "llama", keys={f"general.sampling.{key}": keys[key] for key in keys})
        found: dict[str, Any] = json.loads((bench.open().folder / "generation_config.json").read_text())
        return {name: value for name, value in found.items() if not name.endswith("_token_id")}

    assert generation() == {}
    assert generation(temp=0.6, top_p=0.95, top_k=20) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert generation(min_p=0.05, penalty_repeat=1.1, penalty_last_n=64) == {
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert generation(temp="hot" * 99) == {"temperature": ("hot" * 99)[:40]}  # an engine ignores this one
