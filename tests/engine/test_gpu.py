"""The same engine on a CUDA device: the same tokens as on the CPU, streamed through two rings."""

from itertools import product
from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError, RequestError, SamplingParams
from offspec.core.events import Finished, PassStats
from offspec.draft.lm import DraftModel
from offspec.model.attention import TreeContext
from offspec.model.device import RUNTIME, SLACK
from offspec.model.fused.products import FourBitProduct
from offspec.stream.arena import Arena
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.simulated_cuda import is_simulated
from tests.support.tiny_models import (
    CALIBRATION,
    load_all,
    nothing,
    open_model,
    reference,
    tiny_engine,
    write_model,
)

pytestmark = pytest.mark.gpu
FAMILIES = ["llama", "gemma2", "mistral", "gpt2", "gpt_oss", "qwen3_moe"]
TIERS = {"v": Tier.DEVICE, "c": Tier.CPU, "h": Tier.HOST, "d": Tier.DISK}
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 that is float32: TF32 would make near-ties of what is none."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("family", "draft", "slots", "expand"),
    some(
        [
            (*pair, *ring)
            for pair in product(FAMILIES, ["auto", "same", "hostile", "none"])
            for ring in ((1, True), (3, False))
        ],
        ("llama", "auto", 3, False),
        ("gemma2", "same", 1, True),
        one_in=3,
    ),
)
def test_tokens_are_those_of_the_cpu(
    family: str, draft: str, slots: int, expand: bool, tmp_path: Path
) -> None:
    cuda = torch.device("cuda")
    model = write_model(tmp_path / "model", family)
    hostile = write_model(tmp_path / "hostile", seed=9)
    named = {"same": model, "hostile": hostile}.get(draft, draft)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    sampled = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, top_p=0.9)
    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, sampled).token_ids
    with tiny_engine(model, named, slots=slots, expand=expand, device=cuda) as engine:
        assert list(engine.generate(PROMPT, greedy).token_ids) == reference(model, PROMPT, 20)
        assert engine.generate(PROMPT, sampled).token_ids == expected


@pytest.mark.parametrize(
    ("tiers", "head", "rings"),
    some(
        product(
            ["vvvvv", "hhhhh", "ddddd", "vhdhv", "dhdvd", "ccccc", "vchdc", "hccvd"],
            [Tier.DEVICE, Tier.HOST, Tier.DISK],
            [(1, 1), (3, 2)],
        ),
        ("vvvvv", Tier.DISK, (3, 2)),
        ("hhhhh", Tier.DEVICE, (1, 1)),
        ("ddddd", Tier.HOST, (1, 1)),
        ("vhdhv", Tier.DISK, (3, 2)),
        ("ccccc", Tier.HOST, (1, 1)),
        ("vchdc", Tier.DEVICE, (3, 2)),
        one_in=2,
    ),
)
def test_every_tier_says_the_same(tiers: str, head: Tier, rings: tuple[int, int], tmp_path: Path) -> None:
    """rings: slots, and those in RAM that layers from disk pass through."""
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = reference(model, PROMPT, 20)
    placement = Placement(tuple(TIERS[tier] for tier in tiers), *rings, head)
    draft = "auto" if head is Tier.DEVICE else model
    with tiny_engine(model, draft, placement=placement, device=torch.device("cuda")) as engine:
        assert list(engine.generate(PROMPT, params).token_ids) == expected


@pytest.mark.parametrize("tiers", ["vvvvv", "hhhhh", "ddddd", "vhdhv", "chcdc"])
def test_bytes_of_an_answer_are_those_copied_and_those_read(tiers: str, tmp_path: Path) -> None:
    """Layers in RAM are streamed too: on a GPU a user asks what crosses PCIe, and what the disk gave."""
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    placement = Placement(tuple(TIERS[tier] for tier in tiers), 2, 2)
    device = torch.device("cuda", 0)
    with tiny_engine(model, "none", budget=1, placement=placement, device=device) as engine:
        sizes = engine._assembly.target.layer_bytes
        events = list(engine.stream(PROMPT, params))
    (result,) = [event.result for event in events if isinstance(event, Finished)]
    passes = [event for event in events if isinstance(event, PassStats)]
    copied = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier in "hd")
    read = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier == "d")
    ahead = 4 * max(sizes)  # slots of both rings, which are filled for the next pass
    assert result.passes == len(passes) == 8
    for nbytes, each in ((result.bytes_streamed, copied), (result.bytes_read, read)):
        assert 8 * each - ahead <= nbytes <= 8 * each + ahead
        assert bool(nbytes) == bool(each)
    assert sum(done.bytes_streamed for done in passes) <= result.bytes_streamed
    assert sum(done.bytes_read for done in passes) <= result.bytes_read


@pytest.mark.parametrize("tiers", ["vvvvv", "hhhhh", "vchdv"])
def test_time_in_layers_is_that_of_the_device(tiers: str, tmp_path: Path) -> None:
    """And not of the calls that launch them, which return before anything is computed."""
    model = write_model(tmp_path / "model", num_hidden_layers=5)
    placement, device = Placement(tuple(TIERS[tier] for tier in tiers), 2, 2), torch.device("cuda", 0)
    with tiny_engine(model, "none", budget=1, placement=placement, device=device) as engine:
        events = list(engine.stream(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True)))
        spent = engine._assembly.target.tree_model.spent
    assert spent.layers == 5 and spent.cpu_layers == tiers.count("c")
    for done in (event for event in events if isinstance(event, PassStats)):
        assert done.compute_seconds > 0 and done.wait_seconds >= 0
        if not is_simulated():
            assert done.compute_seconds + done.wait_seconds <= done.target_seconds
        elif "c" not in tiers:  # a millisecond between any two events
            assert done.compute_seconds == pytest.approx(5e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"])
def test_graphs_of_draft_steps_say_what_the_cpu_says(family: str, tmp_path: Path) -> None:
    """Prompts, trees and commits in turn, each count of rows twice: captured, then replayed."""
    folder, said = write_model(tmp_path / "model", family, spread=0.2), list[torch.Tensor]()
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        draft = open_model(folder, device=device)
        load_all(draft, 64)
        lean = draft.lean(64)
        assert lean is not None
        outs = []
        with torch.inference_mode():
            for rows in (9, 5, 1, 5, 9):
                length = lean.cache.length
                position = torch.arange(length, length + rows, device=device)
                context = TreeContext(
                    length, position, 0, torch.ones(rows, rows, device=device).tril().bool()
                )
                outs.append(lean.logits(lean.hidden(position % 90 + 3, context)).cpu())
                lean.cache.commit(0, [0, *range(2, rows)])
        if name == "cuda":
            assert lean._steps is not None and lean._steps._graphs
            assert all(step.graph is not None for step in lean._steps._steps[lean.cache].values())
        said.append(torch.cat(outs))
        lean.close()
        draft.close()
    assert torch.allclose(said[0], said[1], atol=1e-3)


@pytest.mark.parametrize(
    "family", some(["llama", "qwen3", "phi3", "gemma2", "gemma3_text"], "llama", "gemma2")
)
def test_drafts_in_four_bits_say_what_the_cpu_says(family: str, tmp_path: Path) -> None:
    """Multiplied as they are packed, in graphs, but for bfloat16 what unpacked modules say on the CPU."""
    folder = write_model(
        tmp_path / "model", family, spread=0.2, hidden_size=64, intermediate_size=128, head_dim=16
    )
    said = list[torch.Tensor]()
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        draft = open_model(folder, device=device)
        draft.load_rounded(4, False, 64, nothing, CALIBRATION)
        lean = draft.lean(64) if name == "cuda" else None
        model: DraftModel = lean or draft.tree_model
        outs = []
        with torch.inference_mode():
            for rows in (9, 5, 1, 5):
                length = model.cache.length
                position = torch.arange(length, length + rows, device=device)
                context = TreeContext(
                    length, position, 0, torch.ones(rows, rows, device=device).tril().bool()
                )
                outs.append(model.logits(model.hidden(position % 90 + 3, context)).cpu())
                model.cache.commit(0, range(rows))
        if lean is not None:
            assert all(isinstance(layer.qkv, FourBitProduct) for layer in lean._layers)
            assert lean._steps is not None and lean._steps._graphs
            lean.close()
        said.append(torch.cat(outs))
        draft.close()
    assert (said[0] - said[1]).abs().max() < 0.1 * said[0].std()


def test_a_graph_that_cannot_be_captured_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    model = write_model(tmp_path / "model")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with tiny_engine(model, model, device=torch.device("cuda")) as engine:
        assert list(engine.generate(PROMPT, params).token_ids) == reference(model, PROMPT, 20)


@pytest.mark.exhaustive
def test_a_promise_of_device_memory_is_kept(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=256, intermediate_size=2048, num_hidden_layers=12)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = reference(model, PROMPT, 20)
    vram = RUNTIME + SLACK + 60_000_000
    with offspec.load(str(model), device="cuda", dtype="float32", vram=vram, budget=32) as engine:
        result = engine.generate(PROMPT, params)
        assert list(result.token_ids) == expected
        assert 0 < result.peak_device_bytes <= vram
    with pytest.raises(CapacityError, match="`vram`"):
        offspec.load(str(model), device="cuda", vram=RUNTIME + SLACK + 1_000_000)
    with pytest.raises(RequestError, match="of GPU memory: give a smaller limit"):
        offspec.load(str(model), device="cuda", vram="4TB")
    with pytest.raises(CapacityError, match="before any weight"):
        offspec.load(str(model), device="cuda", vram="1MB")


def test_pinning_that_is_refused_leaves_no_error_behind() -> None:
    arena = Arena(1 << 20, pin=True)
    assert arena.pinned and not arena._register(), "memory cannot be registered twice"
    assert torch.ones(3, device="cuda").sum().item() == 3, "the refusal must not surface here"
    arena.close()
    arena.pinned = arena._register()
    assert arena.pinned, "what is closed may be registered again"
    arena.close()
