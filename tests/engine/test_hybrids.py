"""Models with recurrent layers emit the same tokens as transformers, with any draft, reuse or chunking."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from offspec.core.events import Event, Notice
from offspec.engine.engine import Engine
from offspec.engine.pass_runner import PassRunner
from offspec.model import runner
from offspec.model.cache import TreeCache
from offspec_planners.placement import Placement, Tier
from tests.support.answers import generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import HYBRIDS, open_model, reference, tiny_engine, write_hybrid, write_model

pytestmark = pytest.mark.usefixtures("drafters_stay")
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(41)]
# One of each kind of state: gated delta rule, Mamba-1; for make test-all a convolution alone, Mamba-2.
USUAL, MORE = ("qwen3_5_text", "mamba"), ("lfm2", "falcon_h1")
WITHOUT_ATTENTION = {"mamba", "mamba2", "falcon_mamba"}
# With its cache, transformers' step by step forward of these leaves its own forward of whole texts: by 0.01
# of a logit in nemotron_h, by 0.3 after 20 tokens in zamba2. Without it, it says what float64 does.
CACHED_OTHERWISE = {"nemotron_h", "zamba2"}
TOKENS = 12
GREEDY, WARM, HOT = PARAMS = [sampling(temperature, TOKENS) for temperature in (0.0, 0.6, 1.0)]


@dataclass(frozen=True)
class Written:
    """A model, and its answer to the prompt without speculation."""

    name: str
    folder: Path
    says: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def write(name: str) -> Written:
        folder = write_hybrid(tmp_path_factory.mktemp(name) / "model", name)
        return Written(name, folder, generate_tokens(folder, *PARAMS, prompt=PROMPT))

    return write


@pytest.fixture
def hybrid(request: pytest.FixtureRequest, written: Callable[[str], Written]) -> Written:
    return written(request.param)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hostile") / "model", vocab_size=128, seed=99)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("other") / "model", "lfm2", seed=5)


def with_hybrid(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("hybrid", names, indirect=True)


def anew(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """Return the answer to an uncached prompt, without speculation."""
    engine._states.first.forget()
    result = engine.generate(list(prompt), params, speculate=False)
    assert not result.reused_tokens
    return result.token_ids


@pytest.mark.parametrize(
    "hybrid",
    [*sampled_params(sorted(set(HYBRIDS) - {*MORE}), *USUAL, one_in=3), *sampled_params(MORE)],
    indirect=True,
)
def test_tokens_do_not_depend_on_the_guesses(hybrid: Written, hostile: Path) -> None:
    model = open_model(hybrid.folder)
    rows = model.skeleton.rows
    assert rows.tail_numbers and rows.row_numbers and model.skeleton.branches, "layers of every kind"
    assert any(rows.kept) != (hybrid.name in WITHOUT_ATTENTION)
    model.close()
    greedy, warm, hot = hybrid.says
    assert list(greedy) == reference(hybrid.folder, PROMPT, TOKENS)
    assert len(set(greedy)) > 4, "the test model emits too few tokens to detect errors"
    assert len(set(hybrid.says)) == 3
    with tiny_engine(hybrid.folder, hybrid.folder) as engine:
        results = [engine.generate(PROMPT, params) for params in (GREEDY, HOT)]
    assert [result.token_ids for result in results] == [greedy, hot]
    assert all(result.tokens_per_pass >= 4 for result in results)
    assert generate_tokens(hybrid.folder, WARM, draft="self", prompt=PROMPT) == [warm]
    assert generate_tokens(hybrid.folder, HOT, draft=hostile, prompt=PROMPT, budget=7) == [hot]


@pytest.mark.parametrize(
    ("hybrid", "device"),
    [
        ("mamba", "cpu"),
        ("qwen3_5_text", "cpu"),
        pytest.param("qwen3_5_text", "cuda", marks=[pytest.mark.gpu, pytest.mark.exhaustive]),
    ],
    indirect=True,
)
def test_chunks_and_layers_on_disk(
    hybrid: Written, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state goes from part to part, of the prompt and of a tree, while layers come and go."""
    monkeypatch.setattr(runner, "CHUNK", 12)
    layers = len(open_model(hybrid.folder).layers)
    tiers = tuple((Tier.DISK, Tier.HOST, Tier.DEVICE)[layer % 3] for layer in range(layers))
    given = {"placement": Placement(tiers, 2, 2, Tier.DISK), "device": device}
    assert generate_tokens(hybrid.folder, *PARAMS, draft=hybrid.folder, prompt=PROMPT, **given) == hybrid.says


@with_hybrid("qwen3_5_text")
def test_turns(hybrid: Written) -> None:
    """A question more, the same once more, another instead, an early turn changed: as if nothing was kept."""
    params = sampling(0.6, 6)
    with (
        tiny_engine(hybrid.folder, hybrid.folder, budget=24) as engine,
        tiny_engine(hybrid.folder, "none", budget=1) as fresh,
    ):
        first = [*PROMPT, *engine.generate(PROMPT, params).token_ids]
        asked = [*first, *PROMPT[5:25]]
        answer = engine.generate(asked, params)
        assert answer.reused_tokens == len(first) - 1
        assert answer.token_ids == anew(fresh, asked, params)
        again = engine.generate(asked, params)
        assert again.token_ids == answer.token_ids and again.reused_tokens == len(asked) - 1
        for prompt, kept in (
            ([*asked, *answer.token_ids, 8, 9, 10], len(asked) - 1),
            ([*first, *PROMPT[7:30]], len(first) - 1),
            ([*PROMPT, 70, 71, 72], len(PROMPT) - 1),
            ([*PROMPT[:20], 80, *PROMPT[21:]], 0),
            ([5], 0),
        ):
            result = engine.generate(prompt, params)
            assert result.token_ids == anew(fresh, prompt, params)
            assert result.reused_tokens >= kept, "more is computed again than has to be"


@with_hybrid("falcon_h1")
def test_an_interrupt_leaves_the_committed_state(hybrid: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a pass, of its parts: asked again, the answer is what it was."""
    monkeypatch.setattr(runner, "CHUNK", 12)
    after = [*PROMPT, *hybrid.says[2], 5, 6, *PROMPT[:30]]
    with tiny_engine(hybrid.folder, hybrid.folder, budget=24) as engine:
        assert engine.generate(PROMPT, HOT).token_ids == hybrid.says[2]
        looks = iter(range(1000))

        def strike(*given: object) -> None:
            if next(looks) == 17:
                raise KeyboardInterrupt

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(PassRunner, "_check_halted", strike)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(after, HOT)
        result = engine.generate(after, HOT)
        assert result.reused_tokens >= len(PROMPT) - 1
        assert result.token_ids == anew(engine, after, HOT)
        assert engine.generate(PROMPT, HOT).token_ids == hybrid.says[2]


@pytest.mark.parametrize("strike", [2, 5])
@with_hybrid("qwen3_5_text")
def test_a_commit_that_is_broken_off(strike: int, hybrid: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are ahead of keys and values then."""
    commit, calls = TreeCache._commit_states, list[int]()

    def broken_off(cache: TreeCache, pending: int, nodes: Sequence[int]) -> None:
        commit(cache, pending, nodes)
        calls.append(pending)
        if len(calls) == strike:
            raise KeyboardInterrupt

    prompt = [*PROMPT, *hybrid.says[0][:8]]
    with tiny_engine(hybrid.folder, "none", budget=1) as engine:
        with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
            meanwhile.setattr(TreeCache, "_commit_states", broken_off)
            engine.generate(PROMPT, GREEDY)
        found = engine.generate(prompt, GREEDY).token_ids
    assert [found] == generate_tokens(hybrid.folder, GREEDY, prompt=prompt)


@with_hybrid("qwen3_5_text", "mamba")
def test_a_packed_draft_of_a_hybrid(hybrid: Written) -> None:
    """Layers read some of their weights without running the module that would unpack them."""
    heard = list[Event]()
    with tiny_engine(hybrid.folder, expand=False, notify=heard.append) as engine:
        result = engine.generate(PROMPT, GREEDY)
    assert not [event.text for event in heard if isinstance(event, Notice)]
    assert result.token_ids == hybrid.says[0]
    assert result.tokens_per_pass > 1


@with_hybrid("mamba")
def test_a_hybrid_drafts_for_another(hybrid: Written, other: Path) -> None:
    assert generate_tokens(hybrid.folder, *PARAMS, draft=other, prompt=PROMPT, budget=16) == hybrid.says


def test_a_hybrid_drafts_for_a_plain_model(other: Path, hostile: Path) -> None:
    expected = generate_tokens(hostile, WARM, HOT, prompt=PROMPT)
    assert generate_tokens(hostile, WARM, HOT, draft=other, prompt=PROMPT, budget=16) == expected


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", sorted(HYBRIDS), indirect=True)
@pytest.mark.parametrize(("length", "place"), [(1, "tight"), (23, "ample"), (600, "tight")])
def test_long_answers_with_any_budget(
    hybrid: Written, hostile: Path, length: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHUNK", 32 if place == "tight" else 1024)
    prompt = [3 + (5 * i * i + i) % 90 for i in range(length)]
    resident = range(len(open_model(hybrid.folder).layers)) if place == "ample" else ()
    params = [sampling(temperature, 300) for temperature in (0.0, 0.6, 1.0)]
    wanted = generate_tokens(hybrid.folder, *params, prompt=prompt, context=1024)
    cached = hybrid.name not in CACHED_OTHERWISE
    assert list(wanted[0]) == reference(hybrid.folder, prompt, 300, cached=cached)
    drafts = [
        *((hybrid.folder, budget) for budget in (7, 64, 256)),
        *(("self", budget) for budget in (64, 256)),
        *((hostile, budget) for budget in (7, 64)),
    ]
    # Three of the seven in each of the six settings, so that each is met in two of them or more.
    setting = 2 * [1, 23, 600].index(length) + (place == "ample")
    for draft, budget in (drafts[(setting + shift) % 7] for shift in (0, 2, 3)):
        given = {"budget": budget, "context": 1024, "resident": resident}
        assert generate_tokens(hybrid.folder, *params, draft=draft, prompt=prompt, **given) == wanted, (
            draft,
            budget,
        )
