"""Models whose layers carry a state: the same tokens as transformers, whatever is guessed, kept or cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams
from offspec.core.events import Notice
from offspec.engine.engine import Engine
from offspec.engine.passes import Passes
from offspec.model import runner
from offspec.model.cache import TreeCache
from offspec_planners.placement import Placement, Tier
from tests.support.products import some
from tests.support.tiny_models import HYBRIDS, open_model, reference, tiny_engine, write_hybrid, write_model

PROMPT = [3 + (7 * i * i + i) % 90 for i in range(41)]
# One of each kind of state: gated delta rule, Mamba-2, Mamba-1, a convolution alone.
USUAL = ("qwen3_5_text", "falcon_h1", "mamba", "lfm2")
WITHOUT_ATTENTION = {"mamba", "mamba2", "falcon_mamba"}
# With its cache, transformers' step by step forward of these leaves its own forward of whole texts: by 0.01
# of a logit in nemotron_h, by 0.3 after 20 tokens in zamba2. Without it, it says what float64 does.
CACHED_OTHERWISE = {"nemotron_h", "zamba2"}
TOKENS = 12


def _params(temperature: float, tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=6, max_tokens=tokens, ignore_eos=True)


PARAMS = tuple(map(_params, (0.0, 0.6, 1.0)))


@dataclass(frozen=True)
class Written:
    """A model, and what it says without speculation after the prompt."""

    name: str
    folder: Path
    says: dict[SamplingParams, tuple[int, ...]]


def with_hybrids(*usual: str) -> pytest.MarkDecorator:
    """A test of every family, of which `make test` takes these."""
    return pytest.mark.parametrize("hybrid", some(sorted(HYBRIDS), *usual), indirect=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def write(name: str) -> Written:
        folder = write_hybrid(tmp_path_factory.mktemp(name) / "model", name)
        with tiny_engine(folder, "none", budget=1) as engine:
            says = {params: engine.generate(PROMPT, params).token_ids for params in PARAMS}
        return Written(name, folder, says)

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


def anew(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """What is said after a prompt of which nothing is kept, without speculation."""
    engine._state.forget()
    result = engine.generate(list(prompt), params, speculate=False)
    assert not result.reused_tokens
    return result.token_ids


@with_hybrids(*USUAL)
def test_a_model_has_layers_of_every_kind(hybrid: Written) -> None:
    model = open_model(hybrid.folder)
    rows = model.skeleton.rows
    assert rows.tail_numbers and rows.row_numbers
    assert any(rows.kept) != (hybrid.name in WITHOUT_ATTENTION)
    assert model.skeleton.branches
    model.close()


@pytest.mark.parametrize(
    ("hybrid", "every_temperature"),
    some(
        [*((name, True) for name in sorted(HYBRIDS)), *((name, False) for name in USUAL)],
        *((name, False) for name in USUAL),
        one_in=2,
    ),
    indirect=["hybrid"],
)
def test_tokens_do_not_depend_on_the_guesses(hybrid: Written, hostile: Path, every_temperature: bool) -> None:
    assert list(hybrid.says[PARAMS[0]]) == reference(hybrid.folder, PROMPT, TOKENS)
    assert len(set(hybrid.says[PARAMS[0]])) > 4, "the test model says too little to tell right from wrong"
    assert len(set(hybrid.says.values())) == 3
    greedy, warm, hot = PARAMS
    for draft, budget, least, asked in (
        (hybrid.folder, 64, 4, (greedy, hot)),
        ("substitute", 64, 1.2, (warm,)),
        (hostile, 7, 1, (hot,)),
    ):
        with tiny_engine(hybrid.folder, draft, budget=budget) as engine:
            for params in PARAMS if every_temperature else asked:
                result = engine.generate(PROMPT, params)
                assert result.token_ids == hybrid.says[params], (draft, budget, params)
                assert result.tokens_per_pass >= least, (draft, budget, params)


@pytest.mark.parametrize(
    ("hybrid", "device"),
    [
        *some([(family, "cpu") for family in sorted(HYBRIDS)], ("mamba", "cpu")),
        *(
            pytest.param(family, "cuda", marks=[pytest.mark.gpu, pytest.mark.exhaustive])
            for family in ("mamba2", "qwen3_5_text")
        ),
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
    placement = Placement(tiers, 2, 2, Tier.DISK)
    with tiny_engine(hybrid.folder, hybrid.folder, placement=placement, device=device) as engine:
        for params, tokens in hybrid.says.items():
            result = engine.generate(PROMPT, params)
            assert result.token_ids == tokens, params
            assert result.bytes_streamed


@with_hybrids("qwen3_5_text")
def test_turns(hybrid: Written) -> None:
    """A question more, the same once more, another instead, an early turn changed: as if nothing was kept."""
    params = _params(0.6, 6)
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


@with_hybrids("falcon_h1")
@pytest.mark.parametrize("moment", some([2, 9, 17], 17, rare=lambda moment: moment < 17))
def test_an_interrupt_leaves_the_committed_state(
    hybrid: Written, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of growing, of a pass, of its parts: asked again, the answer is what it was."""
    monkeypatch.setattr(runner, "CHUNK", 12)
    params, after = PARAMS[2], [*PROMPT, *hybrid.says[PARAMS[2]], 5, 6, *PROMPT[:30]]
    with tiny_engine(hybrid.folder, hybrid.folder, budget=24) as engine:
        assert engine.generate(PROMPT, params).token_ids == hybrid.says[params]
        looks = iter(range(1000))

        def strike(*given: object) -> None:
            if next(looks) == moment:
                raise KeyboardInterrupt

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Passes, "_look", strike)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(after, params)
        result = engine.generate(after, params)
        assert result.reused_tokens >= len(PROMPT) - 1
        said = result.token_ids
        assert said == anew(engine, after, params)
        assert engine.generate(PROMPT, params).token_ids == hybrid.says[params]


@with_hybrids("mamba")
def test_a_hybrid_drafts_for_another(hybrid: Written, other: Path) -> None:
    with tiny_engine(hybrid.folder, other, budget=16) as engine:
        for params, tokens in hybrid.says.items():
            assert engine.generate(PROMPT, params).token_ids == tokens


@pytest.mark.parametrize("strike", some([2, 5], 5))
def test_a_commit_that_is_broken_off(strike: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are ahead of keys and values then."""
    folder = write_hybrid(tmp_path, "qwen3_5_text")
    commit, calls = TreeCache._commit_states, list[int]()

    def broken_off(cache: TreeCache, pending: int, nodes: Sequence[int]) -> None:
        commit(cache, pending, nodes)
        calls.append(pending)
        if len(calls) == strike:
            raise KeyboardInterrupt

    with tiny_engine(folder, "none", budget=1) as engine, tiny_engine(folder, "none", budget=1) as other:
        says = other.generate(PROMPT, PARAMS[0]).token_ids
        with monkeypatch.context() as meanwhile, pytest.raises(KeyboardInterrupt):
            meanwhile.setattr(TreeCache, "_commit_states", broken_off)
            engine.generate(PROMPT, PARAMS[0])
        prompt = [*PROMPT, *says[:8]]
        assert engine.generate(prompt, PARAMS[0]).token_ids == anew(other, prompt, PARAMS[0])


@with_hybrids(*USUAL)
def test_a_packed_draft_of_a_hybrid(hybrid: Written) -> None:
    """Layers read some of their weights without running the module that would unpack them."""
    heard = list[object]()
    with tiny_engine(hybrid.folder, expand=False, notify=heard.append) as engine:
        result = engine.generate(PROMPT, PARAMS[0])
    assert not [event.text for event in heard if isinstance(event, Notice)]
    assert result.token_ids == hybrid.says[PARAMS[0]]
    assert result.tokens_per_pass > 1


def test_a_hybrid_drafts_for_a_plain_model(other: Path, hostile: Path) -> None:
    with tiny_engine(hostile, "none", budget=1) as engine:
        says = {params: engine.generate(PROMPT, params).token_ids for params in PARAMS[1:]}
    with tiny_engine(hostile, other, budget=16) as engine:
        for params, tokens in says.items():
            assert engine.generate(PROMPT, params).token_ids == tokens


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", sorted(HYBRIDS), indirect=True)
@pytest.mark.parametrize("place", ["tight", "ample"])
@pytest.mark.parametrize("length", [1, 23, 600])
def test_long_answers_with_any_budget(
    hybrid: Written, hostile: Path, length: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHUNK", 32 if place == "tight" else 1024)
    prompt = [3 + (5 * i * i + i) % 90 for i in range(length)]
    resident = range(len(open_model(hybrid.folder).layers)) if place == "ample" else ()
    wanted = {params: tuple[int, ...]() for params in (_params(t, 300) for t in (0.0, 0.6, 1.0))}
    with tiny_engine(hybrid.folder, "none", budget=1, context=1024) as engine:
        for params in wanted:
            wanted[params] = anew(engine, prompt, params)
    greedy = next(iter(wanted))
    cached = hybrid.name not in CACHED_OTHERWISE
    assert list(wanted[greedy]) == reference(hybrid.folder, prompt, 300, cached=cached)
    drafts = [
        *((hybrid.folder, budget) for budget in (7, 64, 256)),
        *(("substitute", budget) for budget in (64, 256)),
        *((hostile, budget) for budget in (7, 64)),
    ]
    # Three of the seven in each of the six settings, so that each is met in two of them or more.
    setting = 2 * [1, 23, 600].index(length) + (place == "ample")
    for draft, budget in (drafts[(setting + shift) % 7] for shift in (0, 2, 3)):
        with tiny_engine(hybrid.folder, draft, budget=budget, context=1024, resident=resident) as engine:
            for params, tokens in wanted.items():
                assert engine.generate(prompt, params).token_ids == tokens, (draft, budget, params)
