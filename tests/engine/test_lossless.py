"""One family, every way of running it: placements, rings, budgets, widths, drafts, prompts, turns."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import SamplingParams
from offspec.model import runner
from offspec.plan import prepare
from offspec.plan.fit import LOOKUP_BUDGETS
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.plan_fixtures import PlanEnvironment
from tests.support.tiny_models import reference, tiny_engine, write_model

RULES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "top_p": 0.98}
PARAMS = [sampling(temperature, 24, **RULES) for temperature in (0.0, 1.0)]
_TIERS = {"v": Tier.DEVICE, "h": Tier.HOST, "d": Tier.DISK}


@pytest.fixture(scope="module")
def expected(trio: TargetAndDrafts) -> list[tuple[int, ...]]:
    return generate_tokens(trio.target, *PARAMS)


@pytest.mark.parametrize(
    ("tiers", "head", "slots"),
    sampled_params(
        [
            ("dddd", "v", 1),
            ("dddd", "d", 9),
            ("hhhh", "h", 1),
            ("vvvv", "d", 2),
            ("vvvv", "v", 2),
            ("vhdh", "d", 2),
            ("dhdv", "h", 4),
        ],
        ("dddd", "d", 9),
        ("vvvv", "v", 2),
        ("dhdv", "h", 4),
    ),
)
def test_any_tiers(
    trio: TargetAndDrafts, expected: list[tuple[int, ...]], tiers: str, head: str, slots: int
) -> None:
    """Layers and output head in all tiers, copied from RAM and disk to slots, with all ring buffer sizes."""
    placement = Placement(tuple(_TIERS[tier] for tier in tiers), slots, 1 + slots % 3, _TIERS[head])
    with tiny_engine(trio.target, trio.near, placement=placement) as engine:
        results = [engine.generate(PROMPT, params) for params in PARAMS]
    assert [result.token_ids for result in results] == expected
    for result in results:
        assert (result.bytes_streamed > 0) == ("d" in tiers + head)


def test_bytes_streamed_on_a_cpu_are_those_read(
    trio: TargetAndDrafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both counts agree even if a prefetching thread counts a block between them."""
    with tiny_engine(trio.target, "none", budget=1, slots=2) as engine:
        stats = engine._assembly.target.ring_stats

        def peak() -> int:
            stats.bytes_moved += 1000
            return 1

        monkeypatch.setattr("offspec.core.memory.peak_bytes", peak)
        result = engine.generate(PROMPT, PARAMS[0])
    assert result.bytes_read == result.bytes_streamed > 0


def test_in_bfloat16_the_place_of_the_head_and_the_chunk_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many rows round alike, so another split emits the same tokens."""
    model = write_model(tmp_path / "model", vocab_size=3000, hidden_size=128, intermediate_size=256)
    prompt, said = [3 + (7 * i * i + i) % 2900 for i in range(65)], set[tuple[int, ...]]()
    for head, chunk in ((Tier.DEVICE, 1024), (Tier.DISK, 1024), (Tier.HOST, 33)):
        monkeypatch.setattr(runner, "CHUNK", chunk)
        placement = Placement((Tier.DISK, Tier.DEVICE, Tier.DISK), 2, 2, head)
        said |= {
            *generate_tokens(model, sampling(1.0), prompt=prompt, placement=placement, dtype=torch.bfloat16)
        }
    assert len(said) == 1


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(
    ("family", "tied", "tier"),
    sampled_params(
        [("llama", False, Tier.HOST), ("llama", True, Tier.DISK), ("phi", False, Tier.DISK)],
        ("phi", False, Tier.DISK),
    ),
)
def test_a_large_head_streams_in_blocks(family: str, tied: bool, tier: Tier, tmp_path: Path) -> None:
    """A tied output head streams, too; embedding rows are then read one by one. Each has its own bias."""
    model = write_model(tmp_path / "model", family, vocab_size=3000, tie_word_embeddings=tied)
    params = sampling(1.0, 20)
    with tiny_engine(model, "none", budget=1) as engine:
        expected = engine.generate(PROMPT, params).token_ids
        target: Any = engine._assembly.target
        blocks = target._head_blocks()
        assert len(blocks) > 2 and blocks[-1].end == 3000
        assert family != "phi" or target.skeleton.model.get_output_embeddings().bias.std() > 0
    placement = Placement((Tier.DISK, Tier.DEVICE, Tier.DISK), 2, 2, tier)
    with tiny_engine(model, model, placement=placement) as engine:
        result = engine.generate(PROMPT, params)
        assert result.token_ids == expected and result.tokens_per_pass > 2


@pytest.mark.parametrize(
    ("budget", "width", "draft", "verify"),
    sampled_params(
        [
            (2, 1, "near", "coupled"),
            (2, 5, "auto", "coupled"),
            (7, 32, "near", "plain"),
            (7, 5, "hostile", "coupled"),
            (64, 5, "near", "coupled"),
            (64, 32, "hostile", "plain"),
            (64, 1, "auto", "plain"),
            (256, 32, "near", "coupled"),
        ],
        (2, 5, "auto", "coupled"),
        (7, 32, "near", "plain"),
        (64, 5, "near", "coupled"),
        (64, 32, "hostile", "plain"),
    ),
)
def test_any_budget_and_width(
    trio: TargetAndDrafts, expected: list[tuple[int, ...]], budget: int, width: int, draft: str, verify: str
) -> None:
    guesses = getattr(trio, draft, draft)
    given = {"budget": budget, "width": width, "verify": verify, "resident": range(4)}
    assert generate_tokens(trio.target, *PARAMS, draft=guesses, **given) == expected


@pytest.mark.usefixtures("drafters_stay")
def test_lean_drafts_and_others_are_believed_alike(
    trio: TargetAndDrafts, expected: list[tuple[int, ...]]
) -> None:
    passes = []
    for lean in (True, False):
        with tiny_engine(trio.target, trio.near, lean=lean) as engine:
            results = [engine.generate(PROMPT, params) for params in PARAMS]
        assert [result.token_ids for result in results] == expected
        passes.append([result.passes for result in results])
    assert passes[0] == passes[1] and max(passes[0]) < 24


@pytest.mark.exhaustive
def test_missing_settings_are_planned(trio: TargetAndDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = sampling(0.0, 20)
    wanted = reference(trio.target, PROMPT, 20)
    # Nothing is kept of what was learnt, or the plan would soon be remade by it.
    load: dict[str, Any] = {"dtype": "float32", "context": 128, "learn": False}
    for draft in ("auto", str(trio.near)):
        with offspec.load(str(trio.target), draft=draft, **load) as engine:
            plan = engine.plan
            assert plan is not None and engine.width <= 64
            # Lookups, which "auto" brings along, find more than is planned for.
            budget = max(plan.budget, LOOKUP_BUDGETS["cpu"]) if draft == "auto" else plan.budget
            assert 1 <= engine.budget <= budget
            assert list(engine.generate(PROMPT, greedy).token_ids) == wanted
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "measure", None)  # a kept plan needs no measuring
            with offspec.load(str(trio.target), draft=draft, **load) as engine:
                assert engine.plan == plan and engine.budget == budget


def test_given_settings_are_not_planned(plan_env: PlanEnvironment) -> None:
    with plan_env.load(budget=9, width=3) as engine:
        assert (engine.plan, engine.budget, engine.width) == (None, 9, 3)
    with plan_env.load(draft="none") as engine:
        assert (engine.plan, engine.budget) == (None, 1)
    with plan_env.load(width=3) as engine:
        assert engine.plan is not None and engine.width == min(3, engine.budget)
    assert plan_env.plan(budget=9).budget == 9


@pytest.mark.parametrize(
    ("size", "verify"), sampled_params([(80, "coupled"), (112, "plain")], (80, "coupled"))
)
def test_heads_padded_to_different_sizes(
    trio: TargetAndDrafts, expected: list[tuple[int, ...]], size: int, verify: str, tmp_path: Path
) -> None:
    """Families pad the same vocabulary to different sizes; ids that one model lacks are harmless."""
    draft = write_model(tmp_path / "draft", vocab_size=size)
    assert generate_tokens(trio.target, *PARAMS, draft=draft, verify=verify) == expected


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
    """RoPE factors equal those of transformers for short and long texts, on both sides of the limit."""
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
    (short,) = generate_tokens(model, sampling(0.0, 20), draft=model, prompt=few, context=32)
    assert list(short) == reference(model, few, 20)
    with tiny_engine(model, model, context=256) as engine:
        assert list(engine.generate(many, sampling(0.0, 20)).token_ids) == reference(model, many, 20)
        over = engine.generate(few, sampling(0.0, 40)).token_ids
    assert list(over) == reference(long, few, 40)
    assert over[:20] != short, "the two sets of factors give different tokens"


@pytest.mark.usefixtures("drafters_stay")
def test_substitutes_in_four_bits_are_believed_alike(tmp_path: Path) -> None:
    """Packed weights multiplied directly, unpacked per module, and as values: the same trees."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # rows of whole groups
    folder = write_model(tmp_path / "model", "gemma2", **sizes)
    expected, passes = generate_tokens(folder, *PARAMS), []
    for expand, lean in ((False, True), (False, False), (True, True)):
        with tiny_engine(folder, "auto", expand=expand, lean=lean) as engine:
            results = [engine.generate(PROMPT, params) for params in PARAMS]
        assert [result.token_ids for result in results] == expected
        passes.append([result.passes for result in results])
    assert passes[0] == passes[1] == passes[2] and max(passes[0]) < 24


def test_a_long_prompt_runs_in_chunks(trio: TargetAndDrafts, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [3 + (7 * i * i + i) % 90 for i in range(150)]
    expected = tuple(reference(trio.target, prompt, 20))
    for chunk in (33, 7):
        monkeypatch.setattr(runner, "CHUNK", chunk)
        assert generate_tokens(trio.target, sampling(0.0, 20), draft=trio.near, prompt=prompt) == [expected]


def test_later_turns_keep_the_shared_prefix(trio: TargetAndDrafts) -> None:
    """Extended, repeated and edited conversations give the same tokens as without a cache."""
    params = sampling(1.0, 15)
    with tiny_engine(trio.target, trio.near) as engine:
        first = engine.generate(PROMPT, params)
        assert first.mismatches is None, "nobody asked"
        longer = [*PROMPT, *first.token_ids, 30, 31, 32]
        for prompt in (longer, longer, [*longer[:12], 40, 41], PROMPT, [9, 8, 7]):
            assert engine.generate(prompt, params, check=True).mismatches == ()
        assert engine.generate(longer, params).reused_tokens == 0
        assert engine.generate(longer, params).reused_tokens == len(longer) - 1


def test_a_seed_is_made_and_reported(trio: TargetAndDrafts) -> None:
    given = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    with tiny_engine(trio.target, trio.near) as engine:
        first, second = (engine.generate(PROMPT, SamplingParams(**given)) for _ in range(2))
        assert first.seed != second.seed
        again = engine.generate(PROMPT, SamplingParams(**given, seed=first.seed))
        assert again.token_ids == first.token_ids
