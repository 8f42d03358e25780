"""One family, every way of running it: placements, rings, budgets, widths, drafts, prompts, turns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import SamplingParams
from offspec.model import runner
from offspec.plan import prepare as choose
from offspec.plan.fit import LOOKED_UP
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.tiny_models import disturb, reference, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    """A target, a draft that agrees with it in part, and one that never does."""
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target", num_hidden_layers=5)
    near = write_model(folder / "near", num_hidden_layers=5)
    disturb(near)
    yield target, near, write_model(folder / "hostile", "qwen2", seed=5)


def _sampling(temperature: float, tokens: int = 24) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=11,
        max_tokens=tokens,
        ignore_eos=True,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        top_p=0.98,
    )


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path, Path]) -> dict[float, tuple[int, ...]]:
    with tiny_engine(models[0], "none", budget=1) as engine:
        return {t: engine.generate(PROMPT, _sampling(t)).token_ids for t in (0.0, 1.0)}


@pytest.mark.parametrize(
    ("resident", "slots"),
    some(
        [((), 1), ((), 2), ((), 3), ((), 5), ((), 9), ((0, 2, 4), 2), ((1,), 2), (range(5), 0)],
        ((), 1),
        ((0, 2, 4), 2),
    ),
)
def test_any_placement_and_ring(
    models: tuple[Path, Path, Path],
    expected: dict[float, tuple[int, ...]],
    resident: tuple[int, ...],
    slots: int,
) -> None:
    target, near, _ = models
    with tiny_engine(target, near, resident=resident, slots=slots) as engine:
        for temperature, tokens in expected.items():
            result = engine.generate(PROMPT, _sampling(temperature))
            assert result.token_ids == tokens
            assert (result.bytes_streamed > 0) == (len(resident) < 5)


def test_bytes_streamed_on_a_cpu_are_those_read(
    models: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a thread that reads ahead counts a block between one count and the other."""
    target, _, _ = models
    with tiny_engine(target, "none", budget=1, resident=(), slots=2) as engine:
        stats = engine._assembly.target.ring_stats

        def peak() -> int:
            stats.bytes_moved += 1000
            return 1

        monkeypatch.setattr("offspec.core.memory.peak_bytes", peak)
        result = engine.generate(PROMPT, _sampling(0.0))
    assert result.bytes_read == result.bytes_streamed > 0


_TIERS = {"v": Tier.DEVICE, "h": Tier.HOST, "d": Tier.DISK}


@pytest.mark.parametrize("slots", some([1, 2, 4], 2, rare=lambda slots: slots == 4))
@pytest.mark.parametrize("head", "vhd")
@pytest.mark.parametrize("tiers", some(["ddddd", "hhhhh", "vhdhv", "dhdhd", "vvvvv"], "vhdhv"))
def test_any_tiers(
    models: tuple[Path, Path, Path],
    expected: dict[float, tuple[int, ...]],
    tiers: str,
    head: str,
    slots: int,
) -> None:
    """Layers and head in every tier, copied from RAM and from disk to slots, in rings of every size."""
    target, near, _ = models
    placement = Placement(tuple(_TIERS[tier] for tier in tiers), slots, 1 + slots % 3, _TIERS[head])
    with tiny_engine(target, near, placement=placement) as engine:
        for temperature, tokens in expected.items():
            result = engine.generate(PROMPT, _sampling(temperature))
            assert result.token_ids == tokens
            assert (result.bytes_streamed > 0) == ("d" in tiers + head)


def test_in_bfloat16_the_place_of_the_head_and_the_chunk_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many rows round alike, so what is split otherwise still says the same."""
    model = write_model(tmp_path / "model", vocab_size=3000, hidden_size=128, intermediate_size=256)
    prompt = [3 + (7 * i * i + i) % 2900 for i in range(65)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
    said = set()
    for head, chunk in ((Tier.DEVICE, 1024), (Tier.DISK, 1024), (Tier.HOST, 64), (Tier.DEVICE, 33)):
        monkeypatch.setattr(runner, "CHUNK", chunk)
        placement = Placement((Tier.DISK, Tier.DEVICE, Tier.DISK), 2, 2, head)
        with tiny_engine(model, "none", budget=1, placement=placement, dtype=torch.bfloat16) as engine:
            said.add(engine.generate(prompt, params).token_ids)
    assert len(said) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_head_streams_in_blocks(tied: bool, tmp_path: Path) -> None:
    """Also where it is the embedding as well, whose rows are then read one by one."""
    model = write_model(tmp_path / "model", vocab_size=3000, tie_word_embeddings=tied)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, params).token_ids
        blocks = engine._assembly.target._head_blocks()
        assert len(blocks) > 3 and blocks[-1].end == 3000
    for tier in (Tier.HOST, Tier.DISK):
        placement = Placement((Tier.DISK, Tier.DEVICE, Tier.DISK), 2, 2, tier)
        with tiny_engine(model, model, placement=placement) as engine:
            result = engine.generate(PROMPT, params)
            assert result.token_ids == expected and result.tokens_per_pass > 2


def test_each_block_of_a_head_has_its_own_bias(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "phi", vocab_size=3000)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with tiny_engine(model, "none", budget=1) as engine:
        target = engine._assembly.target
        assert len(target._head_blocks()) > 2
        bias = target.skeleton.model.get_output_embeddings().bias
        assert bias.std() > 0
        expected = engine.generate(PROMPT, params).token_ids
    placement = Placement((Tier.DISK, Tier.DEVICE, Tier.DISK), 2, 2, Tier.DISK)
    with tiny_engine(model, "none", budget=1, placement=placement) as engine:
        assert engine.generate(PROMPT, params).token_ids == expected


_SIZES = ((1, 1), (2, 5), (2, 32), (7, 1), (7, 32), (64, 5), (64, 32), (256, 1), (256, 32))
_GUESSES = (("near", "coupled"), ("near", "plain"), ("hostile", "coupled"), ("auto", "coupled"))


@pytest.mark.parametrize(
    ("budget", "width", "draft", "verify"),
    some(
        [size + guesses for size in _SIZES for guesses in _GUESSES],
        (2, 5, "near", "coupled"),
        (2, 5, "auto", "coupled"),
        (64, 5, "near", "plain"),
        (64, 5, "hostile", "coupled"),
        one_in=2,
    ),
)
def test_any_budget_and_width(
    models: tuple[Path, Path, Path],
    expected: dict[float, tuple[int, ...]],
    budget: int,
    width: int,
    draft: str,
    verify: str,
) -> None:
    target, near, hostile = models
    guesses = {"near": near, "hostile": hostile}.get(draft, draft)
    with tiny_engine(target, guesses, budget=budget, width=width, resident=range(5), verify=verify) as engine:
        for temperature, tokens in expected.items():
            result = engine.generate(PROMPT, _sampling(temperature))
            assert result.token_ids == tokens
            assert result.passes <= len(tokens)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.exhaustive])],
    indirect=True,
)
def test_lean_drafts_and_others_are_believed_alike(
    models: tuple[Path, Path, Path], expected: dict[float, tuple[int, ...]], device: torch.device
) -> None:
    passes = []
    for lean in (True, False):
        with tiny_engine(models[0], models[1], lean=lean, device=device) as engine:
            results = [engine.generate(PROMPT, _sampling(temperature)) for temperature in expected]
        assert [result.token_ids for result in results] == list(expected.values())
        passes.append([result.passes for result in results])
    assert passes[0] == passes[1]


@pytest.mark.exhaustive
def test_what_is_not_given_is_planned(
    models: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = reference(models[0], PROMPT, 20)
    # Nothing is kept of what was learnt, or the plan would soon be remade by it.
    load = {"dtype": "float32", "context": 128, "learn": False}
    for draft in ("auto", str(models[1])):
        with offspec.load(str(models[0]), draft=draft, **load) as engine:
            plan = engine.plan
            assert plan is not None and engine.width <= 64
            # Lookups, which "auto" brings along, find more than is planned for.
            budget = max(plan.budget, LOOKED_UP["cpu"]) if draft == "auto" else plan.budget
            assert 1 <= engine.budget <= budget
            assert list(engine.generate(PROMPT, greedy).token_ids) == wanted
        monkeypatch.setattr(choose, "measure", _not_again)
        with offspec.load(str(models[0]), draft=draft, **load) as engine:
            assert engine.plan == plan and engine.budget == budget
            assert list(engine.generate(PROMPT, greedy).token_ids) == wanted
        monkeypatch.undo()


@pytest.mark.exhaustive
def test_what_is_given_is_not_planned(models: tuple[Path, Path, Path]) -> None:
    load = {"dtype": "float32", "context": 128}
    with offspec.load(str(models[0]), draft=str(models[1]), budget=9, width=3, **load) as engine:
        assert (engine.plan, engine.budget, engine.width) == (None, 9, 3)
    with offspec.load(str(models[0]), draft="none", **load) as engine:
        assert (engine.plan, engine.budget) == (None, 1)
    with offspec.load(str(models[0]), draft=str(models[1]), width=3, **load) as engine:
        assert engine.plan is not None and engine.width == min(3, engine.budget)
    with offspec.load(str(models[0]), draft=str(models[1]), budget=9, **load) as engine:
        assert engine.plan is not None and engine.plan.budget == 9


def _not_again(*given: object) -> None:
    raise AssertionError("a kept plan needs no measuring")


@pytest.mark.parametrize(
    ("size", "verify"),
    some(
        [(size, verify) for size in (80, 112) for verify in ("coupled", "plain")],
        (80, "coupled"),
        (112, "plain"),
    ),
)
def test_heads_padded_to_different_sizes(
    models: tuple[Path, Path, Path],
    expected: dict[float, tuple[int, ...]],
    size: int,
    verify: str,
    tmp_path: Path,
) -> None:
    """Families pad the same vocabulary to different sizes; ids that one of the two lacks do no harm."""
    draft = write_model(tmp_path / "draft", vocab_size=size)
    with tiny_engine(models[0], draft, budget=64, verify=verify) as engine:
        for temperature, tokens in expected.items():
            assert engine.generate(PROMPT, _sampling(temperature)).token_ids == tokens


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.3, 1.6, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 32,
}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.4}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "rope", "always_long"),
    [
        ("phi3", LONGROPE, {"short_factor": LONGROPE["long_factor"]}),
        ("phimoe", LONGROPE | MSCALES, {"short_mscale": MSCALES["long_mscale"]}),
    ],
)
def test_longrope_takes_the_factors_of_its_context(
    family: str, rope: dict[str, Any], always_long: dict[str, Any], tmp_path: Path
) -> None:
    """Those of transformers for texts of either kind, and the same ones before and behind the limit."""
    model, long = (
        write_model(
            tmp_path / name,
            family,
            rope_parameters=rope | changed,
            original_max_position_embeddings=32,
            sliding_window=None,
        )
        for name, changed in (("model", {}), ("long", always_long))
    )
    few, many = PROMPT[:8], PROMPT * 5
    assert len(few) + 20 < 32 < len(many)
    for draft in ("none", model):
        with tiny_engine(model, draft, context=32) as engine:
            short = list(engine.generate(few, _greedy(20)).token_ids)
        assert short == reference(model, few, 20)
        with tiny_engine(model, draft, context=256) as engine:
            assert engine._assembly.target.skeleton.context_length == 512
            assert list(engine.generate(many, _greedy(20)).token_ids) == reference(model, many, 20)
            over = list(engine.generate(few, _greedy(40)).token_ids)
        assert over == reference(long, few, 40)
        assert over[:20] != short, "the two sets of factors say different things"


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_packed_and_expanded_substitutes_agree(models: tuple[Path, Path, Path]) -> None:
    results = []
    for expand in (True, False):
        with tiny_engine(models[0], "auto", expand=expand) as engine:
            results.append(engine.generate(PROMPT, _sampling(1.0)))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].passes == results[1].passes, "the same rounded weights guess the same"


@pytest.mark.parametrize("family", some(["llama", "qwen3", "phi3", "gemma", "gemma2"], "gemma2"))
def test_substitutes_in_four_bits_are_believed_alike(family: str, tmp_path: Path) -> None:
    """Multiplied as they are packed, unpacked for every module, and as values: the same trees."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole groups
    folder = write_model(tmp_path / "model", family, **sizes)
    with tiny_engine(folder, "none", budget=1) as engine:
        expected = [engine.generate(PROMPT, _sampling(temperature)).token_ids for temperature in (0.0, 1.0)]
    passes = []
    for expand, lean in ((False, True), (False, False), (True, True)):
        with tiny_engine(folder, "auto", expand=expand, lean=lean) as engine:
            results = [engine.generate(PROMPT, _sampling(temperature)) for temperature in (0.0, 1.0)]
        assert [result.token_ids for result in results] == expected
        passes.append([result.passes for result in results])
    assert passes[0] == passes[1] == passes[2] and max(passes[0]) < 24


def test_a_long_prompt_runs_in_chunks(
    models: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [3 + (7 * i * i + i) % 90 for i in range(150)]
    expected = reference(models[0], prompt, 20)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for chunk in (512, 33, 7):
        monkeypatch.setattr(runner, "CHUNK", chunk)
        with tiny_engine(models[0], models[1]) as engine:
            assert list(engine.generate(prompt, params).token_ids) == expected


def test_later_turns_keep_the_shared_prefix(models: tuple[Path, Path, Path]) -> None:
    """Extending, repeating and editing a conversation gives what a fresh engine gives."""
    params = _sampling(1.0, tokens=15)
    target, near, _ = models
    with tiny_engine(target, near) as engine:
        first = engine.generate(PROMPT, params)
        longer = [*PROMPT, *first.token_ids, 30, 31, 32]
        turns = [longer, longer, [*longer[:12], 40, 41], PROMPT, [9, 8, 7]]
        for prompt in turns:
            result = engine.generate(prompt, params)
            with tiny_engine(target, "none", budget=1) as fresh:
                assert result.token_ids == fresh.generate(prompt, params).token_ids
        assert engine.generate(longer, params).reused_tokens == 0
        assert engine.generate(longer, params).reused_tokens == len(longer) - 1


def test_check_finds_nothing_and_says_so(models: tuple[Path, Path, Path]) -> None:
    with tiny_engine(models[0], models[1]) as engine:
        assert engine.generate(PROMPT, _sampling(0.6), check=True).mismatches == ()
        assert engine.generate(PROMPT, _sampling(0.6)).mismatches is None


def test_a_seed_is_made_and_reported(models: tuple[Path, Path, Path]) -> None:
    with tiny_engine(models[0], models[1]) as engine:
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        first, second = engine.generate(PROMPT, params), engine.generate(PROMPT, params)
        assert first.seed != second.seed
        again = engine.generate(
            PROMPT, SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=first.seed)
        )
        assert again.token_ids == first.token_ids
