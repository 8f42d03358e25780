"""Draft sources, alone and combined, change no token of the target."""

import inspect
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import DraftError, Engine, Finished, Notice, PassStats, RequestError
from offspec.core import memory
from offspec.core.config import EngineConfig
from offspec.draft.base import Children, Drafter, Features, RequiredStates, Scorer
from offspec.draft.forward import alone
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.heads.state_drafter import StateDrafter
from offspec.draft.lm import LMDrafter
from offspec.model import embedding
from offspec.model.cache import TreeCache
from offspec.stream.direct_reader import DirectReader
from tests.support import eagle_files, heads_files
from tests.support.answers import PROMPT, sampling
from tests.support.exhaustive import sampled_params
from tests.support.mtp_files import CENTRED, HYBRID, HYBRID_EXPERTS, write_with_mtp
from tests.support.plan_fixtures import MB, PlanEnvironment, save_plan
from tests.support.tiny_models import VOCABULARY, disturb, tiny_engine, write_model

COPIED = [*PROMPT, 70, *PROMPT, 71, *PROMPT[:5]]
PARAMS = {temperature: sampling(temperature) for temperature in (0.0, 1.0)}
GIVEN: dict[str, Any] = {"dtype": "float32", "context": 160, "budget": 24, "width": 4}
Expected = dict[tuple[float, int], tuple[int, ...]]
pytestmark = pytest.mark.usefixtures("drafters_stay")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, models similar and dissimilar to it, and a head of each kind."""
    place = tmp_path_factory.mktemp("drafts")
    write_model(place / "target", num_hidden_layers=eagle_files.LAYERS)
    write_model(place / "near", num_hidden_layers=eagle_files.LAYERS)
    disturb(place / "near")
    write_model(place / "unlike", seed=9, num_hidden_layers=2, vocab_size=60)
    heads_files.write_head(place / "medusa", None, heads_files.medusa_tensors())
    heads_files.write_head(place / "mlp", heads_files.mlp_config(), heads_files.mlp_tensors())
    for kind in ("eagle", "eagle3"):
        eagle_files.write_head(place / kind, eagle_files.make_head(kind))
    return place


@pytest.fixture(scope="module")
def names(folder: Path) -> list[str]:
    heads = [str(folder / name) for name in ("medusa", "mlp", "eagle", "eagle3")]
    return ["self", "early-exit", *heads]


@pytest.fixture(scope="module")
def engine(folder: Path, names: list[str]) -> Iterator[Engine]:
    """Engine with all draft sources that can be loaded together."""
    with offspec.load(str(folder / "target"), draft=names, **GIVEN) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """Answers of an engine without draft, by temperature and prompt length."""
    with offspec.load(str(folder / "target"), draft="none", **GIVEN | {"budget": 1}) as engine:
        return {
            (temperature, len(prompt)): engine.generate(prompt, params).token_ids
            for temperature, params in PARAMS.items()
            for prompt in (PROMPT, COPIED)
        }


@pytest.mark.exhaustive
def test_each_source_and_every_mixture_in_one_engine(
    engine: Engine, names: list[str], expected: Expected
) -> None:
    """Successive requests with different sources, alternating two prompts and two temperatures."""
    every = [[name] for name in (*names, "suffix", "lookup")]
    mixed = [["suffix", *pair] for pair in pairwise(names)]
    for turn, drafts in enumerate([*every, ["none"], *mixed, [*names, "suffix", "lookup"], *every]):
        prompt, temperature = (PROMPT, COPIED)[turn % 2], (0.0, 1.0, 1.0)[turn % 3]
        found = engine.generate(prompt, PARAMS[temperature], draft=drafts)
        assert found.token_ids == expected[temperature, len(prompt)], drafts
        assert {name for name, _ in found.guessed_by} <= set(drafts)
        assert sum(count for _, count in found.guessed_by) >= found.tokens - found.passes
        assert found.budget == (1 if drafts == ["none"] else 24)


def test_copied_text_takes_few_passes(engine: Engine, expected: Expected) -> None:
    """The suffix lookup learns a given answer; results contain accepted tokens by source."""
    wanted = expected[0.0, len(PROMPT)]
    assert engine.generate(PROMPT, PARAMS[0.0], draft="suffix").token_ids == wanted
    again = engine.generate(PROMPT, PARAMS[0.0], draft="suffix")
    assert again.token_ids == wanted and again.tokens_per_pass > 3
    assert again.draft == "suffix" and [name for name, _ in again.guessed_by] == ["suffix"]
    passes = [event for event in engine.stream(PROMPT, PARAMS[0.0]) if isinstance(event, PassStats)]
    for done in passes:
        assert sum(count for _, count in done.guessed_by) in (done.emitted - 1, done.emitted)


def test_a_request_takes_what_is_loaded_and_nothing_else(engine: Engine, names: list[str]) -> None:
    assert engine.sources == (*names, "suffix", "lookup")
    assert engine.draft.startswith("self (4-bit) + early-exit") and "suffix" not in engine.draft
    with pytest.raises(RequestError, match="is not available: this engine was loaded with self") as caught:
        engine.generate(PROMPT, draft="mtp")
    assert "\n" not in str(caught.value)
    engine.use("suffix,self")
    assert engine.draft == "suffix + self (4-bit)"
    engine.use("auto")
    assert engine.draft.startswith("self (4-bit) + early-exit")


def test_a_model_that_guesses_badly_and_in_other_words(folder: Path, expected: Expected) -> None:
    notices = list[object]()
    named = [str(folder / "unlike"), str(folder / "medusa")]
    with offspec.load(str(folder / "target"), draft=named, notify=notices.append, **GIVEN) as engine:
        for drafts, temperature in ((named[:1], 1.0), (["suffix", *named], 0.0)):
            found = engine.generate(COPIED, PARAMS[temperature], draft=drafts)
            assert found.token_ids == expected[temperature, len(COPIED)]
    told = [event.text for event in notices if isinstance(event, Notice)]
    assert len(told) == 2 and "60 of 96 tokens map" in told[1]


@pytest.mark.parametrize("family", sampled_params(CENTRED, "qwen3_5_text"))
def test_the_module_of_a_target_with_states(family: str, tmp_path: Path) -> None:
    """Recurrent target with an MTP module that has attention: alone, and with lookups."""
    overrides = HYBRID if family == "qwen3_5_text" else HYBRID_EXPERTS
    target = str(write_with_mtp(tmp_path / "target", "qwen", family, overrides))
    with offspec.load(target, draft="none", **GIVEN | {"budget": 1}) as engine:
        expected = {t: engine.generate(COPIED, PARAMS[t]).token_ids for t in PARAMS}
    with offspec.load(target, draft="mtp,suffix", **GIVEN) as engine:
        for draft, temperature in zip(("mtp", "mtp,suffix"), PARAMS, strict=True):
            said = engine.generate(COPIED, PARAMS[temperature], draft=draft).token_ids
            assert said == expected[temperature], draft


class Hostile(Drafter):
    """Drafts random tokens with maximum confidence and requires all hidden states."""

    name = "hostile"
    required_states = RequiredStates(True, (0, 2))

    def __init__(self) -> None:
        self.seen = 0
        self._random = torch.Generator().manual_seed(1)

    def fork(self, target: TreeCache) -> "Hostile":
        return Hostile()

    def start(self, ids: Sequence[int]) -> None: ...

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        picked = torch.stack([torch.randperm(VOCABULARY, generator=self._random)[:8] for _ in nodes])
        sure = torch.full(picked.shape, -2.1).numpy()
        return Children(picked.numpy(), sure, sure)

    def observe(self, features: Features) -> None:
        assert features.start <= self.seen
        assert all(len(states) == len(features) for states in features.inputs.values())
        assert list(features.inputs) == [0, 2]
        self.seen = features.start + len(features)

    def rewind(self, length: int) -> None:
        self.seen = min(self.seen, length)

    def close(self) -> None: ...


@pytest.mark.parametrize(("budget", "verify"), sampled_params([(24, "coupled"), (7, "plain")], (7, "plain")))
def test_hostile_sources_with_others(folder: Path, budget: int, verify: str, expected: Expected) -> None:
    hostile = Hostile()
    with tiny_engine(
        folder / "target",
        f"{folder / 'near'},suffix,lookup",
        budget=budget,
        width=5,
        verify=verify,
        more=lambda target: {"hostile": hostile},
    ) as engine:
        for draft in (None, "hostile", "hostile,suffix", "none", "suffix"):
            for temperature, prompt in zip(PARAMS, (COPIED, PROMPT), strict=True):
                found = engine.generate(prompt, PARAMS[temperature], draft=draft)
                assert found.token_ids == expected[temperature, len(prompt)]
                assert hostile.seen == len(prompt) + found.tokens - 1, "whether it was asked or not"


def test_a_budget_of_one_loads_no_draft(folder: Path, names: list[str]) -> None:
    with offspec.load(str(folder / "target"), draft=names, **GIVEN | {"budget": 1}) as engine:
        assert engine.sources == ("suffix", "lookup") and engine.draft == "none"
        assert engine.generate(PROMPT, sampling(0.0, 4)).passes == 4


@pytest.mark.parametrize("draft", sampled_params(["self", "early-exit", "mtp", "eagle3"], "self", "mtp"))
def test_a_step_of_a_draft_waits_for_no_disk(
    draft: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding rows of the draft or the target are in RAM, since the disk is busy with layers."""
    steps, reads = [0, 0], list[int]()  # that run, and that have run
    read = DirectReader.read_into

    def note(*args: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            reads.append(steps[0])
        return read(*args)

    def stepping(step: Any) -> Any:
        def run(*args: Any) -> Any:
            steps[0] += 1
            found = (yield from step(*args)) if inspect.isgeneratorfunction(step) else step(*args)
            steps[:] = steps[0] - 1, steps[1] + 1
            return found

        return run if inspect.isgeneratorfunction(step) else lambda *args: alone(run(*args))

    monkeypatch.setattr(embedding, "_KEPT_ROWS", 0)
    monkeypatch.setattr(DirectReader, "read_into", note)
    monkeypatch.setattr(LMDrafter, "expand_steps", stepping(LMDrafter.expand_steps))
    monkeypatch.setattr(StateDrafter, "expand", stepping(StateDrafter.expand))
    sizes = {"tie_word_embeddings": False}
    if draft == "mtp":
        target = write_with_mtp(tmp_path / "target", "deepseek", "llama", sizes)
    else:
        target = write_model(tmp_path / "target", num_hidden_layers=eagle_files.LAYERS, **sizes)
    name = str(folder / draft) if draft.startswith("eagle") else draft
    with offspec.load(str(target), draft=name, **GIVEN) as engine:
        engine.generate(PROMPT, PARAMS[0.0])
    assert steps[0] == 0 < steps[1] and reads and not any(reads)


@pytest.mark.exhaustive
def test_heads_are_planned_for(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "runtime_overhead", lambda fresh: 600 * MB)  # other engines are open here
    given = {"draft": f"{folder / 'eagle3'},suffix", "dtype": "float32", "context": 96}
    with offspec.load(str(folder / "target"), **given) as engine:
        plan = engine.plan
        assert plan is not None and plan.draft == given["draft"] and plan.draft_mode == "head"
        assert plan.acceptance == "typical of a small head, not measured" and "suffix" in plan.notes[0]
        assert all(seconds > 0 for _, seconds in plan.costs.step)
        assert engine.generate(PROMPT, PARAMS[1.0], check=True).mismatches == ()
        assert engine.preview(PROMPT, PARAMS[1.0]) == [], "it would need to see the target at work"
    with offspec.load(str(folder / "target"), **given) as engine:
        assert engine.plan == plan


@pytest.mark.parametrize("main", sampled_params(["medusa", "near"], "medusa"))
def test_lookups_guess_where_by_the_plan_no_draft_pays(
    folder: Path, plan_env: PlanEnvironment, tmp_path: Path, main: str
) -> None:
    head, greedy = str(folder / main), PARAMS[0.0]
    draft = f"suffix,{head}"
    plan = save_plan(plan_env.plan(draft=draft), tmp_path / "plan.json", budget=1)
    with plan_env.load(draft=draft, plan=plan) as engine:
        assert engine.sources == (head, "suffix", "lookup") and engine.plan is not None
        assert engine.plan.budget == 1 and engine.budget == 64
        alone = engine.generate(PROMPT, greedy, draft=head)
        assert (alone.passes, alone.budget, alone.guessed_by) == (16, 1, ())
        assert engine.generate(PROMPT, greedy).token_ids == alone.token_ids
        again = engine.generate(PROMPT, greedy)  # all of it has been read by now
        assert again.token_ids == alone.token_ids and again.budget == 64
        assert again.tokens_per_pass > 1.5 and [name for name, _ in again.guessed_by] == ["suffix"]
        assert len(engine.preview(PROMPT, greedy, trees=2)) == (2 if main == "near" else 0)
        engine.use("none")
        assert engine.budget == engine.generate(PROMPT, greedy).budget == 1


def test_the_answer_is_the_same_while_the_drafter_of_a_fixed_shape_rests(plan_env: PlanEnvironment) -> None:
    with plan_env.load(tree="sequoia") as engine:
        expected = engine.generate(PROMPT, sampling(1.0, 40), draft="none").token_ids
        engine.generate(PROMPT, sampling(1.0, 2))
        (standing,) = engine._assembly.sources._standing.values()
        standing.payoff.paused_passes = 5
        *events, last = engine.stream(PROMPT, sampling(1.0, 40))
    assert isinstance(last, Finished) and last.result.token_ids == expected
    nodes = [event.tree_nodes for event in events if isinstance(event, PassStats)]
    assert nodes[:6] == [1] * 6 and max(nodes) > 1, "of six passes the first, with the prompt, is not counted"


def test_nearly_equal_temperatures_are_one(engine: Engine, names: list[str]) -> None:
    """Otherwise a client with ever new temperatures would make records grow without learning."""
    for name in names[:2]:
        known = engine.drafting.calibration(name, 0.7, True)
        assert engine.drafting.calibration(name, 0.7004, True) is known
        assert engine.drafting.calibration(name, 0.75, True) is not known


@pytest.mark.parametrize(
    ("draft", "error", "words"),
    [("self,{near}", RequestError, "only one can be loaded at a time"), ("mtp", DraftError, "no MTP module")],
)
def test_invalid_drafts(folder: Path, draft: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        offspec.load(str(folder / "target"), draft=draft.format(near=folder / "near"), **GIVEN)
    assert "\n" not in str(caught.value)


def test_a_path_may_have_a_comma(tmp_path: Path) -> None:
    odd = tmp_path / "a,b"
    odd.mkdir()
    assert EngineConfig("m", draft=f"suffix,{odd},lookup").drafts == ("suffix", str(odd), "lookup")
    assert EngineConfig("m", draft=str(odd)).drafts == (str(odd),)
    assert EngineConfig("m", draft="a,b").drafts == ("a", "b")


def test_texts_of_earlier_are_copied_from(folder: Path, tmp_path: Path) -> None:
    """If a corpus file contains the answer, nearly all of it is drafted in few passes."""
    model, asked = str(folder / "target"), "w5 w9 w17"
    with offspec.load(model, draft="suffix", **GIVEN) as engine:
        first = engine.generate(asked, PARAMS[0.0], raw=True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "note.md").write_text(f"{asked} {first.text}")
    (tmp_path / "texts" / "photo").write_bytes(b"\xff\xfe")
    with offspec.load(model, draft="suffix", corpus=[tmp_path / "texts"], **GIVEN) as engine:
        again = engine.generate(asked, PARAMS[0.0], raw=True)
    assert again.token_ids == first.token_ids and again.passes < first.passes
    with pytest.raises(RequestError, match="`corpus`"):
        offspec.load(model, corpus=[tmp_path / "nowhere"], **GIVEN)
