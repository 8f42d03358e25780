"""GGUF files streamed as they are: the answers of the same weights stored whole, for its bytes."""

import importlib.util
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import offspec
from offspec import SamplingParams
from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.open import DEMO_PACKAGE, embedded_model
from offspec.checkpoint.tensors import on_disk
from offspec.model.attention import TreeContext
from offspec_planners.placement import Placement
from tests.checkpoint.gguf_families import tiny_model
from tests.checkpoint.gguf_files import write_gguf
from tests.checkpoint.gguf_hybrids import HYBRIDS, module_tensors, with_module
from tests.checkpoint.gguf_values import ours
from tests.support.expert_models import by_need
from tests.support.products import some
from tests.support.tiny_models import nothing, open_model, tiny_engine

KIND: Any = gguf.GGMLQuantizationType
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
QUESTION = "The capital of France"
PAGE = 4096
with_demo = pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"{DEMO_PACKAGE} is not installed"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))


def sampling(temperature: float, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7, max_tokens=tokens, ignore_eos=True)


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
EXPERTS = {"qwen2moe": "Q4_0", "qwen3moe": "Q8_0", "llama with experts": "Q5_0", "gpt-oss": "MXFP4"}


@pytest.mark.parametrize(
    ("family", "device"),
    [
        *some([(family, "cpu") for family in FAMILIES], ("gemma3", "cpu"), one_in=2),
        pytest.param("llama", "cuda", marks=[pytest.mark.gpu, pytest.mark.exhaustive]),
    ],
    indirect=["device"],
)
def test_the_tokens_of_the_same_weights_stored_whole(
    tmp_path: Path, family: str, device: torch.device
) -> None:
    """With a draft and without, streamed and in memory, greedy and sampled."""
    file = tmp_path / "tiny.gguf"
    kind = KIND[FAMILIES[family]]
    write_gguf(file, tiny_model(family), family, kind=kind, mixed={"token_embd": KIND.Q8_0})
    whole = dense(file, tmp_path / "dense")
    with tiny_engine(whole, "none", budget=1) as engine:
        expected = {t: engine.generate(PROMPT, sampling(t, 16)).token_ids for t in (0.0, 1.0)}
    assert len(set(expected.values())) == 2
    resident: tuple[int, ...]
    for draft, budget, resident in (("none", 1, ()), ("auto", 16, ()), (str(whole), 16, (0, 2))):
        with tiny_engine(file, draft, budget=budget, resident=resident, device=device) as engine:
            for temperature, tokens in expected.items():
                result = engine.generate(PROMPT, sampling(temperature, 16))
                assert result.token_ids == tokens, (draft, temperature)
                assert result.bytes_streamed > 0


def test_ministral(tmp_path: Path) -> None:
    """transformers does not load it from GGUF, so its weights are in a type that says all of them."""
    model, file = tiny_model("mistral3"), tmp_path / "tiny.gguf"
    write_gguf(file, model, "mistral3", kind=KIND.BF16)
    save(model.state_dict(), open_checkpoint(str(file)), tmp_path / "dense")
    with tiny_engine(tmp_path / "dense", "none", budget=1) as engine:
        expected = engine.generate(PROMPT, sampling(1.0, 30)).token_ids
    with tiny_engine(file, "auto", budget=16) as engine:
        assert engine.generate(PROMPT, sampling(1.0, 30)).token_ids == expected


@pytest.mark.parametrize("family", some(EXPERTS, "gpt-oss"))
def test_fused_experts(tmp_path: Path, family: str) -> None:
    """Streamed as they are, by layers and by need, against the same values stored whole."""
    file = tmp_path / "tiny.gguf"
    model = tiny_model(family, **({"shared_expert_intermediate_size": 64} if family == "qwen2moe" else {}))
    write_gguf(file, model, family, kind=KIND.Q8_0, mixed={"_exps": KIND[EXPERTS[family]]})
    checkpoint = open_checkpoint(str(file))
    save(ours(checkpoint).state_dict(), checkpoint, tmp_path / "whole")
    with tiny_engine(tmp_path / "whole", "none", budget=1) as engine:
        expected = {t: engine.generate(PROMPT, sampling(t, 16)).token_ids for t in (0.0, 1.0)}
    assert len(set(expected.values())) == 2
    resident: tuple[int, ...]
    for draft, budget, resident in (("none", 1, ()), ("auto", 16, ()), (str(file), 16, (0, 2))):
        with tiny_engine(file, draft, budget=budget, resident=resident) as engine:
            for temperature, tokens in expected.items():
                result = engine.generate(PROMPT, sampling(temperature, 16))
                assert result.token_ids == tokens, (draft, temperature)
                assert result.bytes_streamed > 0
    with tiny_engine(file, "auto", budget=16, placement=by_need(3, 5)) as engine:
        for temperature, tokens in expected.items():
            assert engine.generate(PROMPT, sampling(temperature, 16)).token_ids == tokens
        store = engine._assembly.target.store
        assert store is not None and store.stats.hits < store.stats.asked


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", some(HYBRIDS, "qwen35", "granitehybrid"))
def test_hybrids(tmp_path: Path, family: str) -> None:
    """Layers with a state, whose files are laid out for llama.cpp: the tokens of the model's own folder."""
    model, file = tiny_model(family), tmp_path / "tiny.gguf"
    write_gguf(file, model, family, kind=KIND.BF16)
    save(model.state_dict(), open_checkpoint(str(file)), tmp_path / "whole")
    with tiny_engine(tmp_path / "whole", "none", budget=1) as engine:
        expected = {t: engine.generate(PROMPT, sampling(t, 20)).token_ids for t in (0.0, 1.0)}
    for draft, budget in (("none", 1), ("auto", 16)):
        with tiny_engine(file, draft, budget=budget) as engine:
            for temperature, tokens in expected.items():
                assert engine.generate(PROMPT, sampling(temperature, 20)).token_ids == tokens


@pytest.mark.exhaustive
def test_the_prediction_module_of_a_file(tmp_path: Path) -> None:
    """Behind the last layer of the file: it drafts, still quantised, for its own target."""
    one = tiny_model("qwen35", num_hidden_layers=1, layer_types=["full_attention"])
    tensors, _ = module_tensors(4, one, "qwen35")
    file, model = tmp_path / "tiny.gguf", tiny_model("qwen35")
    write_gguf(file, model, "qwen35", kind=KIND.Q8_0, keys=with_module("qwen35"), tensors=tensors)
    said = []
    for draft, budget in (("none", 1), ("mtp", 16)):
        with offspec.load(str(file), draft=draft, dtype="float32", context=64, budget=budget) as engine:
            said.append([engine.generate(PROMPT, sampling(t, 16)).token_ids for t in (0.0, 1.0)])
            assert draft in engine.sources or draft == "none"
    assert said[0] == said[1]


def stored_bytes(checkpoint: Checkpoint, layer: int) -> int:
    weights = [weight for name, weight in checkpoint.tensors.items() if f".layers.{layer}." in name]
    return sum(info.nbytes for weight in weights for info in on_disk(weight))


@pytest.mark.exhaustive
@with_demo
def test_the_demo_streams_its_quantised_bytes() -> None:
    """A layer is as large as in the file, up to the pages that its ends share, and a pass reads each once."""
    checkpoint = open_checkpoint("demo")
    model = open_model(embedded_model(), torch.bfloat16)
    sizes = [stored_bytes(checkpoint, layer) for layer in range(30)]
    ids, seen = torch.tensor([504, 3575, 282, 4649]), [0]
    model.load(Placement.in_memory(30, [], 2), 32, nothing)
    try:
        assert all(
            size <= found <= size + 2 * PAGE for size, found in zip(sizes, model.layer_bytes, strict=True)
        )
        for _ in range(4):
            with torch.no_grad():
                model.tree_model.hidden(ids, TreeContext.chain(len(ids), torch.device("cpu")))
            model.tree_model.cache.rewind(0)
            seen.append(model.bytes_streamed)
    finally:
        model.close()
    assert sum(sizes) < 0.32 * sum(2 * weight_count(checkpoint, layer) for layer in range(30))
    ahead = 3 * max(model.layer_bytes)  # the ring may have begun with the next pass
    for before, after in pairwise(seen[1:]):
        assert abs(after - before - sum(model.layer_bytes)) <= ahead


def weight_count(checkpoint: Checkpoint, layer: int) -> int:
    return sum(
        torch.Size(weight.shape).numel()
        for name, weight in checkpoint.tensors.items()
        if f".layers.{layer}." in name
    )


@pytest.mark.slow
@with_demo
@pytest.mark.exhaustive
def test_the_demo_says_what_its_unpacked_weights_say(tmp_path: Path) -> None:
    """In float32, against the weights as transformers unpacks them: bit for bit the same model."""
    whole = dense(embedded_model(), tmp_path / "dense")
    said = {}
    for model in ("demo", str(whole)):
        with offspec.load(model, draft="none", dtype="float32", context=64, budget=1) as engine:
            said[model] = [engine.generate(QUESTION, sampling(t, 8)).token_ids for t in (0.0, 1.0)]
    assert said["demo"] == said[str(whole)]


@with_demo
@pytest.mark.slow
def test_the_demo_says_the_same_with_a_draft() -> None:
    said = []
    for draft, budget in (("none", 1), ("auto", 16)):
        with tiny_engine(embedded_model(), draft, budget=budget, context=128) as engine:
            said.append([engine.generate(QUESTION, sampling(t, 16)).token_ids for t in (0.0, 1.0)])
    assert said[0] == said[1]
