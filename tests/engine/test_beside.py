"""Layers that the CPU computes beside a GPU: the same tokens, whatever kind of layers these are."""

from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError, SamplingParams
from offspec.core.events import unheard
from offspec.model import runner
from offspec.model.attention import TreeContext
from offspec.model.device import RUNTIME, SLACK
from offspec.model.quantize.pack import pack_model
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.tiny_models import (
    nothing,
    open_model,
    reference,
    tiny_engine,
    write_hybrid,
    write_model,
)

pytestmark = pytest.mark.gpu
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, top_p=0.9)
CUDA = torch.device("cuda", 0)
_EVERY_KIND = (
    "gemma2", "gemma3n_text", "gemma4_text", "gpt2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_moe"
)  # fmt: skip


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 that is float32: TF32 would make near-ties of what is none."""
    torch.backends.cuda.matmul.allow_tf32 = False


def _placed(layers: int, first: Tier = Tier.DEVICE) -> Placement:
    """Every other layer on the CPU, the last of them too."""
    others = (first, Tier.HOST, Tier.DISK)
    tiers = tuple(Tier.CPU if layer % 2 else others[layer // 2 % 3] for layer in range(layers - 1))
    return Placement((*tiers, Tier.CPU), 2, 2, Tier.HOST)


@pytest.mark.parametrize("family", some(_EVERY_KIND, "gpt_oss"))
def test_families(family: str, tmp_path: Path) -> None:
    """Windows, sinks, experts, latents, keys of other layers and inputs of each layer hop as well."""
    model = write_model(tmp_path / "model", family)
    with tiny_engine(model, "none", budget=1) as engine:
        sampled = engine.generate(PROMPT, SAMPLED).token_ids
    placement = _placed(len(open_model(model).layers))
    with tiny_engine(model, model, placement=placement, device=CUDA) as engine:
        assert list(engine.generate(PROMPT, GREEDY).token_ids) == reference(model, PROMPT, 12)
        result = engine.generate(PROMPT, SAMPLED)
        assert result.token_ids == sampled and result.cpu_layers == 2


@pytest.mark.parametrize("family", some(["qwen3_5_text", "zamba2", "falcon_mamba"], "qwen3_5_text"))
def test_layers_with_a_state(family: str, tmp_path: Path) -> None:
    """The state lies where its layer is computed, and is committed and rewound there."""
    model = write_hybrid(tmp_path / "model", family)
    placement = _placed(len(open_model(model).layers))
    with tiny_engine(model, "none", budget=1) as engine:
        expected = [engine.generate(prompt, SAMPLED).token_ids for prompt in (PROMPT, PROMPT[:6])]
    draft = "auto" if family == "qwen3_5_text" else model  # a substitute takes over the target's states
    with tiny_engine(model, draft, placement=placement, device=CUDA) as engine:
        found = [engine.generate(prompt, SAMPLED).token_ids for prompt in (PROMPT, PROMPT[:6])]
    assert found == expected


def test_packed_layers(tmp_path: Path) -> None:
    """Each is unpacked where it is computed."""
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_hidden_layers=5)
    pack = tmp_path / "pack"
    pack_model(str(model), "nf4", out=pack, notify=unheard)
    with tiny_engine(pack, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, SAMPLED).token_ids
    with tiny_engine(pack, model, placement=_placed(5), device=CUDA) as engine:
        assert engine.generate(PROMPT, SAMPLED).token_ids == expected


@pytest.mark.parametrize("chunk", some([1024, 5], 5))
def test_in_bfloat16_the_number_of_them_fixes_the_tokens(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft, tree, chunks and the place of all other layers still change nothing."""
    monkeypatch.setattr(runner, "CHUNK", chunk)
    model = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, num_hidden_layers=5)
    said = set()
    for first, draft, budget in ((Tier.DEVICE, "none", 1), (Tier.DISK, model, 24), (Tier.HOST, model, 7)):
        placement = _placed(5, first)
        engine = tiny_engine(
            model, draft, budget=budget, placement=placement, device=CUDA, dtype=torch.bfloat16
        )
        with engine:
            said.add(engine.generate(PROMPT, SAMPLED).token_ids)
    assert len(said) == 1


def test_states_for_heads_are_kept_where_the_heads_are(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    target = open_model(model, device=CUDA)
    target.load(_placed(5), 64, nothing)
    target.tree_model.taps = (1, 2, 5)
    tokens = torch.tensor(PROMPT, device=CUDA)
    with torch.no_grad():
        hidden = target.tree_model.hidden(tokens, TreeContext.chain(len(PROMPT), CUDA))
    tapped = target.tree_model.tapped
    assert sorted(tapped) == [1, 2, 5]
    assert {states.device.type for states in (hidden, *tapped.values())} == {"cuda"}
    target.close()


@pytest.mark.exhaustive
def test_the_number_that_is_asked_for_is_loaded(tmp_path: Path) -> None:
    """It decides which layers these are, and with them the tokens, whatever the memory limits."""
    model = write_model(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    settings = {"cpu_layers": 2, "draft": str(model), "budget": 16, "width": 4, "context": 64}
    said = set()
    with pytest.raises(CapacityError) as caught:
        offspec.load(str(model), device="cuda", vram=RUNTIME + SLACK + 1_000_000, **settings)
    for vram in (caught.value.needed, None):
        with offspec.load(str(model), device="cuda", vram=vram, **settings) as engine:
            result = engine.generate(PROMPT, SAMPLED)
            assert (result.cpu_layers, engine.placement["cpu_layers"]) == (2, 2)
            said.add((result.token_ids, engine.placement["resident_layers"] < 4))
    assert len(said) == 2 and len({tokens for tokens, _ in said}) == 1
