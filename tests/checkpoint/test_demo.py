"""Embedded model, unpacked: the real SmolLM2, its text and its weights."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.open import DEMO_PACKAGE, embedded_model
from offspec.checkpoint.tensors import PackedInfo, stored_tensors
from tests.support.versions import needs_transformers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"{DEMO_PACKAGE} is not installed"
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint("demo", unpack=True, cache_dir=tmp_path_factory.mktemp("cache"))


def test_configuration(demo: Checkpoint) -> None:
    assert demo.name == "demo"
    assert demo.nbytes == 269_030_016
    assert demo.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in demo.tensors
    stored = [info for weight in demo.tensors.values() for info in stored_tensors(weight)]
    assert len({info.file for info in stored}) == 31
    assert all(info.dtype == "BF16" for info in stored)
    generation = GenerationConfig.from_pretrained(demo.folder)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)


def test_streamed_in_place(demo: Checkpoint, tmp_path: Path) -> None:
    packed = open_checkpoint("demo", cache_dir=tmp_path)
    assert packed.nbytes == 96_576_768
    assert packed.tensors.keys() == demo.tensors.keys()
    assert packed.config == demo.config
    kinds = Counter(w.format.name for w in packed.tensors.values() if isinstance(w, PackedInfo))
    assert kinds == {"Q4_1": 210, "Q8_0": 1}
    assert {info.file for w in packed.tensors.values() for info in stored_tensors(w)} == {embedded_model()}
    for file in packed.folder.iterdir():
        assert file.read_bytes() == (demo.folder / file.name).read_bytes()


@needs_transformers("5.18")
def test_its_text(demo: Checkpoint) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.folder)
    for text in (
        "  two leading spaces",
        "a  b\n\n\tif x == 1234:\n    return '42'\n",
        "2024-01-31: naïve café, 日本語 🎉",
        " The answer is 1000000.",
        "\n\n\n trailing \t ",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("x = 1234")["input_ids"])[-4:] == list("1234")
    for special, number in {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}.items():
        assert tokenizer(special)["input_ids"] == [number]
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_its_answer(demo: Checkpoint) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(demo.folder)
    assert model.dtype == torch.bfloat16
    ids: Any = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0][ids["input_ids"].shape[1] :])
