"""GGUF files streamed as they are: the answers of the same weights stored whole, for its bytes."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import offspec
from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.open import DEMO_PACKAGE, embedded_model
from offspec.checkpoint.tensors import stored_tensors
from tests.support.answers import PROMPT, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import on_demand_placement
from tests.support.gguf_families import tiny_model
from tests.support.gguf_files import write_gguf
from tests.support.gguf_hybrids import HYBRIDS, module_tensors, with_mtp
from tests.support.gguf_values import load_float32
from tests.support.tiny_models import tiny_engine

KIND: Any = gguf.GGMLQuantizationType
QUESTION = "The capital of France"
PAGE = 4096
with_demo = pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"{DEMO_PACKAGE} is not installed"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))


def dense(file: Path, folder: Path) -> Path:
    """A folder of the file's weights in float32, as transformers itself unpacks them."""
    checkpoint = open_checkpoint(str(file))
    config = AutoConfig.from_pretrained(checkpoint.folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, config=config
    )
    save(theirs.state_dict(), checkpoint, folder)
    return folder


def save(state: dict[str, torch.Tensor], checkpoint: Checkpoint, folder: Path) -> None:
    """Write weights as a folder, with the configuration and the tokenizer of a checkpoint."""
    config = AutoConfig.from_pretrained(checkpoint.folder)
    with torch.device("meta"):  # nothing is drawn at random only to be replaced
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    for name in checkpoint.folder.iterdir():
        if name.name != "config.json":
            shutil.copy(name, folder)


FAMILIES = {
    "llama": "Q4_1",
    "qwen2": "Q8_0",
    "qwen3": "Q4_0",
    "phi3": "Q5_0",
    "gemma2": "Q5_1",
    "gemma3": "Q8_0",
    "starcoder2": "Q4_1",
}
MORE = ("llama", "phi3")
EXPERTS = {"qwen2moe": "Q4_0", "qwen3moe": "Q8_0", "llama with experts": "Q5_0", "gpt-oss": "MXFP4"}


def check(file: Path, whole: Path, tokens: int = 16, **options: Any) -> None:
    """Compare tokens with those of `whole`: with and without draft, streamed or resident."""
    params = [sampling(temperature, tokens) for temperature in (0.0, 1.0)]
    expected = generate_tokens(whole, *params)
    assert expected[0] != expected[1]
    for draft, budget, resident in (("none", 1, ()), ("auto", 16, ()), (file, 16, (0, 2))):
        with tiny_engine(file, draft, budget=budget, resident=resident, **options) as engine:
            results = [engine.generate(PROMPT, one) for one in params]
            assert [result.token_ids for result in results] == expected, draft
            assert all(result.bytes_streamed > 0 for result in results)


@pytest.mark.parametrize("family", sampled_params(FAMILIES, "gemma3", rare=lambda name: name not in MORE))
def test_the_tokens_of_the_same_weights_stored_whole(tmp_path: Path, family: str) -> None:
    file, kind = tmp_path / "tiny.gguf", KIND[FAMILIES[family]]
    write_gguf(file, tiny_model(family), family, kind=kind, mixed={"token_embd": KIND.Q8_0})
    check(file, dense(file, tmp_path / "dense"))
    with tiny_engine(file, "none", budget=1) as engine:
        streamed = engine._assembly.target.layer_bytes
    tensors = open_checkpoint(str(file)).tensors.items()
    for layer, size in enumerate(streamed):
        weights = [weight for name, weight in tensors if f".layers.{layer}." in name]
        stored = sum(info.nbytes for weight in weights for info in stored_tensors(weight))
        assert stored <= size <= stored + 2 * PAGE, "as large as in the file, up to the pages of its ends"


def test_ministral(tmp_path: Path) -> None:
    """transformers does not load this family from GGUF, so the weights have a lossless type."""
    model, file = tiny_model("mistral3"), tmp_path / "tiny.gguf"
    write_gguf(file, model, "mistral3", kind=KIND.BF16)
    save(model.state_dict(), open_checkpoint(str(file)), tmp_path / "dense")
    params = sampling(1.0, 30)
    assert generate_tokens(file, params, draft="auto", budget=16) == generate_tokens(
        tmp_path / "dense", params
    )


@pytest.mark.parametrize("family", sampled_params(EXPERTS))
def test_fused_experts(tmp_path: Path, family: str) -> None:
    """Streamed as they are, by layers and by need, against the same values stored whole."""
    file, whole = tmp_path / "tiny.gguf", tmp_path / "whole"
    model = tiny_model(family, **({"shared_expert_intermediate_size": 64} if family == "qwen2moe" else {}))
    write_gguf(file, model, family, kind=KIND.Q8_0, mixed={"_exps": KIND[EXPERTS[family]]})
    checkpoint = open_checkpoint(str(file))
    save(load_float32(checkpoint).state_dict(), checkpoint, whole)
    check(file, whole)
    with tiny_engine(file, "auto", budget=16, placement=on_demand_placement(3, 5)) as engine:
        params = sampling(1.0)
        assert [engine.generate(PROMPT, params).token_ids] == generate_tokens(whole, params)
        store = engine._assembly.target.store
        assert store is not None and store.stats.hits < store.stats.requested


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sampled_params(HYBRIDS, "qwen35", "granitehybrid", rare=lambda name: True))
def test_hybrids(tmp_path: Path, family: str) -> None:
    """Layers with a state, whose files are laid out for llama.cpp: the tokens of the model's own folder."""
    model, file = tiny_model(family), tmp_path / "tiny.gguf"
    write_gguf(file, model, family, kind=KIND.BF16)
    save(model.state_dict(), open_checkpoint(str(file)), tmp_path / "whole")
    params = [sampling(temperature, 20) for temperature in (0.0, 1.0)]
    assert generate_tokens(file, *params, draft="auto", budget=16) == generate_tokens(
        tmp_path / "whole", *params
    )


@pytest.mark.exhaustive
def test_the_prediction_module_of_a_file(tmp_path: Path) -> None:
    """The MTP module after the last layer of the file drafts, still quantized, for its target."""
    one = tiny_model("qwen35", num_hidden_layers=1, layer_types=["full_attention"])
    tensors, _ = module_tensors(4, one, "qwen35")
    file, model = tmp_path / "tiny.gguf", tiny_model("qwen35")
    write_gguf(file, model, "qwen35", kind=KIND.Q8_0, keys=with_mtp("qwen35"), tensors=tensors)
    said = []
    for draft, budget in (("none", 1), ("mtp", 16)):
        with offspec.load(str(file), draft=draft, dtype="float32", context=64, budget=budget) as engine:
            said.append([engine.generate(PROMPT, sampling(t, 16)).token_ids for t in (0.0, 1.0)])
            assert draft in engine.sources or draft == "none"
    assert said[0] == said[1]


@with_demo
@pytest.mark.slow
def test_the_demo_matches_its_unpacked_weights(tmp_path: Path) -> None:
    """In float32, against the weights as transformers unpacks them, with a draft and without."""
    file, params = embedded_model(), [sampling(temperature, 8) for temperature in (0.0, 1.0)]
    given = {"prompt": QUESTION, "context": 128}
    expected = generate_tokens(dense(file, tmp_path / "dense"), *params, **given)
    assert (
        generate_tokens(file, *params, **given)
        == generate_tokens(file, *params, draft="auto", budget=16, **given)
        == expected
    )
