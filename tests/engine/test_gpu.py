"""Engine on a CUDA device: the same tokens as on the CPU, streamed through two ring buffers."""

from pathlib import Path

import pytest
import torch

import offspec
from offspec import CapacityError, RequestError
from offspec.core.events import Finished, PassStats
from offspec.draft.forward import DraftModel
from offspec.model.attention import TreeContext
from offspec.model.devices import RUNTIME, SLACK
from offspec.model.fused.linear import Int4Linear
from offspec.stream.arena import Arena
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
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
CUDA = torch.device("cuda", 0)
TIERS = {"v": Tier.DEVICE, "c": Tier.CPU, "h": Tier.HOST, "d": Tier.DISK}
PARAMS = [sampling(0.0, 12), sampling(1.0, 12, top_p=0.9)]


@pytest.fixture(scope="module")
def expected(trio: TargetAndDrafts) -> list[tuple[int, ...]]:
    return generate_tokens(trio.target, PARAMS[1])


@pytest.mark.parametrize(
    ("family", "draft", "slots", "expand"),
    sampled_params(
        [
            ("llama", "auto", 3, False),
            ("gemma2", "same", 1, True),
            ("mistral", "auto", 1, True),
            ("gpt2", "hostile", 3, False),
            ("gpt_oss", "same", 3, False),
            ("qwen3_moe", "none", 1, True),
        ],
        ("llama", "auto", 3, False),
        ("gemma2", "same", 1, True),
    ),
)
def test_tokens_are_those_of_the_cpu(
    family: str, draft: str, slots: int, expand: bool, trio: TargetAndDrafts, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", family)
    named = {"same": model, "hostile": trio.hostile}.get(draft, draft)
    expected = generate_tokens(model, *PARAMS)
    assert list(expected[0]) == reference(model, PROMPT, 12)
    assert (
        generate_tokens(model, *PARAMS, draft=named, budget=24, slots=slots, expand=expand, device=CUDA)
        == expected
    )


@pytest.mark.parametrize(
    ("tiers", "head", "rings"),
    [
        ("vvvv", Tier.DISK, (3, 2)),
        ("hhhh", Tier.DEVICE, (1, 1)),
        ("dddd", Tier.HOST, (1, 1)),
        ("vhdh", Tier.DISK, (3, 2)),
        ("cccc", Tier.HOST, (1, 1)),
        ("vchd", Tier.DEVICE, (3, 2)),
        ("hccd", Tier.DISK, (1, 1)),
    ],
)
def test_every_tier_emits_the_same_tokens(
    tiers: str, head: Tier, rings: tuple[int, int], trio: TargetAndDrafts, expected: list[tuple[int, ...]]
) -> None:
    """rings: slots, and those in RAM that layers from disk pass through."""
    placement = Placement(tuple(TIERS[tier] for tier in tiers), *rings, head)
    draft = "auto" if head is Tier.DEVICE else trio.near
    assert generate_tokens(trio.target, PARAMS[1], draft=draft, placement=placement, device=CUDA) == expected


@pytest.mark.parametrize(
    ("family", "draft", "caches", "int8"),
    [
        ("llama", "suffix", Tier.HOST, True),
        pytest.param("llama", "auto", Tier.DEVICE, True, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", "suffix", Tier.HOST, True, marks=pytest.mark.exhaustive),
    ],
)
def test_placement_and_bits_of_the_kv_cache(
    family: str, draft: str, caches: Tier, int8: bool, tmp_path: Path
) -> None:
    """Two turns; the second reuses rows that were committed, compacted and truncated."""
    folder, found = write_model(tmp_path / "model", family, num_hidden_layers=4), list[list[object]]()
    placement = Placement((Tier.DISK, Tier.DEVICE, Tier.HOST, Tier.DISK), 2, 2, caches=caches)
    for options in (
        {"draft": "none", "budget": 1},
        {"draft": draft, "budget": 12, "placement": placement, "device": CUDA},
    ):
        with tiny_engine(folder, int8_cache=int8, **options) as engine:
            answer = engine.generate(PROMPT, PARAMS[0]).token_ids
            again = engine.generate([*PROMPT, *answer[:7], 40, 41], PARAMS[1]).token_ids
            found.append([answer, again])
    assert found[0] == found[1]


def test_the_callers_current_stream_does_not_matter(tmp_path: Path) -> None:
    """Passes run in a thread that has another current stream than the thread that loads the models."""
    model = write_model(tmp_path / "model", "mixtral", num_hidden_layers=2)
    with torch.cuda.stream(torch.cuda.Stream(CUDA)):
        found = generate_tokens(model, *PARAMS, resident=(0, 1), slots=0, device=CUDA)
    assert found == generate_tokens(model, *PARAMS)


@pytest.mark.parametrize("tiers", ["vvvv", "hhhh", "vhdh", "chcd"])
def test_bytes_and_seconds_of_an_answer(tiers: str, trio: TargetAndDrafts) -> None:
    """Bytes copied and read; time in layers is measured on the device, not on the launching host.

    Layers in RAM are streamed too: on a GPU a user asks what crosses PCIe, and what the disk gave.
    """
    placement = Placement(tuple(TIERS[tier] for tier in tiers), 2, 2)
    with tiny_engine(trio.target, "none", budget=1, placement=placement, device=CUDA) as engine:
        sizes = engine._assembly.target.layer_bytes
        events = list(engine.stream(PROMPT, sampling(0.0, 8)))
        spent = engine._assembly.target.tree_model.pass_time
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
    assert spent.layers == 4 and spent.cpu_layers == tiers.count("c")
    for done in passes:
        assert done.compute_seconds > 0 and done.wait_seconds >= 0
        if not is_simulated():
            assert done.compute_seconds + done.wait_seconds <= done.target_seconds
        elif "c" not in tiers:  # a millisecond between any two events
            assert done.compute_seconds == pytest.approx(4e-3)


def _stepped(model: DraftModel, device: torch.device, rows: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of successive steps with these numbers of rows; some rows of each are committed."""
    outs = []
    with torch.inference_mode():
        for count in rows:
            length = model.cache.length
            position = torch.arange(length, length + count, device=device)
            mask = torch.ones(count, count, device=device).tril().bool()
            context = TreeContext(length, position, 0, mask)
            outs.append(model.logits(model.hidden(position % 90 + 3, context)).cpu())
            model.cache.commit(0, [0, *range(2, count)])
    return torch.cat(outs)


@pytest.mark.parametrize(
    "family", sampled_params(["llama", "qwen3", "phi3", "gemma2", "gemma3_text"], "llama", "gemma2")
)
def test_graphs_of_draft_steps_match_the_cpu(family: str, tmp_path: Path) -> None:
    """Prompts, trees and commits alternate; each number of rows runs twice, captured and replayed."""
    folder, said = write_model(tmp_path / "model", family, spread=0.2), list[torch.Tensor]()
    for device in (torch.device("cpu"), CUDA):
        draft = open_model(folder, device=device)
        load_all(draft, 64)
        lean = draft.fused_model(64)
        assert lean is not None
        said.append(_stepped(lean, device, (9, 5, 1, 5, 9)))
        if device is CUDA:
            assert lean._steps is not None and lean._steps._graphs
            assert all(step.graph is not None for step in lean._steps._steps[lean.cache].values())
        lean.close()
        draft.close()
    assert torch.allclose(said[0], said[1], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_4_bit_drafts_match_the_cpu(family: str, tmp_path: Path) -> None:
    """Packed weights are multiplied in graphs; up to bfloat16 rounding, results equal the CPU's."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder, said = write_model(tmp_path / "model", family, spread=0.2, **sizes), list[torch.Tensor]()
    for device in (torch.device("cpu"), CUDA):
        draft = open_model(folder, device=device)
        draft.load_quantized(4, False, 64, nothing, CALIBRATION)
        lean = draft.fused_model(64) if device is CUDA else None
        said.append(_stepped(lean or draft.tree_model, device, (9, 5, 1, 5)))
        if lean is not None:
            assert all(isinstance(layer.qkv, Int4Linear) for layer in lean._layers)
            assert lean._steps is not None and lean._steps._graphs
            lean.close()
        draft.close()
    assert (said[0] - said[1]).abs().max() < 0.1 * said[0].std()


@pytest.mark.exhaustive
def test_a_promise_of_device_memory_is_kept(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=256, intermediate_size=2048, num_hidden_layers=6)
    expected = reference(model, PROMPT, 12)
    vram = RUNTIME + SLACK + 30_000_000
    with offspec.load(str(model), device="cuda", dtype="float32", vram=vram, budget=8, width=2) as engine:
        result = engine.generate(PROMPT, PARAMS[0])
        assert list(result.token_ids) == expected
        assert 0 < result.peak_device_bytes <= vram
    with pytest.raises(CapacityError, match="`vram`"):
        offspec.load(str(model), device="cuda", vram=RUNTIME + SLACK + 1_000_000)
    with pytest.raises(RequestError, match="of GPU memory: give a smaller limit"):
        offspec.load(str(model), device="cuda", vram="4TB")
    with pytest.raises(CapacityError, match="CUDA and torch alone need"):
        offspec.load(str(model), device="cuda", vram="1MB")


def test_pinning_that_is_refused_leaves_no_error_behind() -> None:
    arena = Arena(1 << 20, pin=True)
    assert arena.pinned and not arena._register(), "memory cannot be registered twice"
    assert torch.ones(3, device="cuda").sum().item() == 3, "the refusal must not surface here"
    arena.close()
    arena.pinned = arena._register()
    assert arena.pinned, "what is closed may be registered again"
    arena.close()
