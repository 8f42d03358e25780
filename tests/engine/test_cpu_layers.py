"""Layers computed by the CPU in addition to a GPU emit the same tokens, for all kinds of layers."""

from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError
from offspec.core.events import ignore_event
from offspec.model import runner
from offspec.model.attention import TreeContext
from offspec.model.devices import RUNTIME, SLACK
from offspec.model.quantize.pack import pack_model
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import (
    HYBRIDS,
    nothing,
    open_model,
    reference,
    tiny_engine,
    write_hybrid,
    write_model,
)

pytestmark = pytest.mark.gpu
SAMPLED = sampling(1.0, 12, top_p=0.9)
CUDA = torch.device("cuda", 0)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}
# Windows, sinks, experts, latents, keys of other layers, inputs of each layer, and states.
_EVERY_KIND = (
    "gemma3n_text", "gemma4_text", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_5_text", "falcon_mamba"
)  # fmt: skip


def _placed(layers: int, first: Tier = Tier.DEVICE) -> Placement:
    """Place every other layer on the CPU, including the last layer."""
    others = (first, Tier.HOST, Tier.DISK)
    tiers = tuple(Tier.CPU if layer % 2 else others[layer // 2 % 3] for layer in range(layers - 1))
    return Placement((*tiers, Tier.CPU), 2, 2, Tier.HOST)


@pytest.mark.parametrize("family", sampled_params(_EVERY_KIND, "gpt_oss", "qwen3_5_text"))
def test_families(family: str, tmp_path: Path) -> None:
    """The recurrent state is on the device of its layer, and is committed and rewound there."""
    model = (write_hybrid if family in HYBRIDS else write_model)(tmp_path / "model", family)
    placement = _placed(len(open_model(model).layers))
    expected = generate_tokens(model, SAMPLED, prompt=PROMPT[:6])
    draft = "auto" if family == "qwen3_5_text" else model  # a substitute takes over the target's states
    with tiny_engine(model, draft, placement=placement, device=CUDA) as engine:
        result = engine.generate(PROMPT, sampling(0.0, 12))
        assert list(result.token_ids) == reference(model, PROMPT, 12)
        assert [engine.generate(PROMPT[:6], SAMPLED).token_ids] == expected
        assert result.cpu_layers == len(placement.layers(Tier.CPU)) > 0


def test_packed_layers(tmp_path: Path) -> None:
    """Quantized layers are unpacked on the device that computes them."""
    model, pack = write_model(tmp_path / "model", **SIZES), tmp_path / "pack"
    pack_model(str(model), "nf4", out=pack, notify=ignore_event)
    found = generate_tokens(pack, SAMPLED, draft=model, placement=_placed(5), device=CUDA)
    assert found == generate_tokens(pack, SAMPLED)


def test_in_bfloat16_the_number_of_them_fixes_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft, tree, chunks and the placement of all other layers do not affect tokens."""
    model, said = write_model(tmp_path / "model", **SIZES), set[tuple[int, ...]]()
    for chunk, first, draft, budget in (
        (1024, Tier.DEVICE, "none", 1), (5, Tier.DISK, model, 24), (5, Tier.HOST, model, 7)
    ):  # fmt: skip
        monkeypatch.setattr(runner, "CHUNK", chunk)
        given = {"budget": budget, "placement": _placed(5, first), "device": CUDA, "dtype": torch.bfloat16}
        said |= {*generate_tokens(model, SAMPLED, draft=draft, **given)}
    assert len(said) == 1


def test_states_for_heads_are_kept_where_the_heads_are(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    target = open_model(model, device=CUDA)
    target.load(_placed(5), 64, nothing)
    target.tree_model.aux_layers = (1, 2, 5)
    tokens = torch.tensor(PROMPT, device=CUDA)
    with torch.no_grad():
        hidden = target.tree_model.hidden(tokens, TreeContext.chain(len(PROMPT), CUDA))
    tapped = target.tree_model.aux_hidden_states
    assert sorted(tapped) == [1, 2, 5]
    assert {states.device.type for states in (hidden, *tapped.values())} == {"cuda"}
    target.close()


@pytest.mark.exhaustive
def test_the_number_that_is_asked_for_is_loaded(tmp_path: Path) -> None:
    """The number decides which layers the CPU computes, and so the tokens, regardless of memory limits."""
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
