"""A failing source loses only its own proposals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offspec import Engine, Notice, PassStats, SamplingParams
from offspec.core.events import Event
from offspec.draft.base import Children
from offspec.draft.growing_tree import Subtree
from offspec.engine.pass_runner import PassRunner
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import tiny_engine, write_model

pytestmark = pytest.mark.usefixtures("drafters_stay")  # failing sources fail at some call
PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
PARAMS = [SamplingParams(max_tokens=24, ignore_eos=True, seed=3, temperature=t) for t in (0.0, 0.9)]
AFTER = 6  # successful calls

Change = Callable[[Children], Children]


class FailingSource:
    """A drafter or a lookup whose method fails, or returns invalid values, from its seventh call on."""

    def __init__(self, inner: Any, method: str = "", change: Change | None = None) -> None:
        self._inner, self.name = inner, inner.name
        self.fail(method, change)

    def fail(self, method: str, change: Change | None = None) -> None:
        self.method, self.change, self.calls = method, change, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._counted(found) if name == self.method else found

    def _counted(self, found: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls <= AFTER:
                return found(*args)
            if self.change is None:
                raise IndexError("index 40 is out of bounds\nfor dimension 0 with size 40")
            return self.change(found(*args))

        return call


def _nan(children: Children) -> Children:
    log_prob = children.log_prob.copy()
    log_prob[-1, -1] = np.nan
    return replace(children, log_prob=log_prob)


CHANGES: dict[str, Change] = {
    "not a number": _nan,
    "no token": lambda children: replace(children, token=children.token + 10**6),
    "rows missing": lambda children: replace(
        children, token=children.token[:0], log_prob=children.log_prob[:0], x=children.x[:0]
    ),
    "columns differ": lambda children: replace(children, token=children.token[:, :1]),
    "flat": lambda children: replace(children, token=children.token[0]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target", num_hidden_layers=3)


@dataclass
class FaultHarness:
    """An engine with a drafter that fails as a test requires, and the output of the target alone."""

    engine: Engine
    drafter: FailingSource
    heard: list[Event]
    expected: list[tuple[int, ...]]

    def check(self, failing: FailingSource, method: str, change: Change | None = None) -> None:
        """Every answer equals the target's; a source fails once in each, and the next request retries it."""
        failing.fail(method, change)
        for params, tokens in zip(PARAMS, self.expected, strict=True):
            self.heard.clear()
            assert self.engine.generate(PROMPT, params).token_ids == tokens
            notices = [event.text for event in self.heard if isinstance(event, Notice)]
            assert len(notices) == 1 and "does not draft for the rest of this answer" in notices[0]
            assert "\n" not in notices[0]
        failing.fail("")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    with tiny_engine(folder, "none") as engine:
        return [engine.generate(PROMPT, params).token_ids for params in PARAMS]


@contextmanager
def opened(folder: Path, draft: str, expected: list[tuple[int, ...]]) -> Iterator[FaultHarness]:
    heard, made = list[Event](), list[FailingSource]()

    def wrap(inner: Any) -> FailingSource:
        made.append(FailingSource(inner))
        return made[-1]

    with tiny_engine(folder, draft, budget=16, width=4, wrap=wrap, notify=heard.append) as engine:
        yield FaultHarness(engine, made[0], heard, expected)


@pytest.fixture(scope="module")
def bench(folder: Path, expected: list[tuple[int, ...]]) -> Iterator[FaultHarness]:
    with opened(folder, "self", expected) as found:
        yield found


@pytest.mark.parametrize("method", ["start", "expand", "commit", "adopt_target_cache"])
def test_drafter_that_raises(bench: FaultHarness, method: str) -> None:
    bench.check(bench.drafter, method)


@pytest.mark.parametrize("change", CHANGES)
def test_drafter_with_invalid_proposals(bench: FaultHarness, change: str) -> None:
    bench.check(bench.drafter, "expand", CHANGES[change])


@pytest.mark.parametrize(
    "method", sampled_params(["start", "continuations", "learn", "a drafter's"], "continuations", "learn")
)
def test_source_that_raises_next_to_another(
    folder: Path, expected: list[tuple[int, ...]], method: str
) -> None:
    """Each case uses a new engine: a lookup that has seen the answer leaves few passes."""
    with opened(folder, "self,suffix", expected) as bench:
        if method == "a drafter's":
            bench.check(bench.drafter, "expand")
        else:
            lookup: Any = bench.engine._assembly.sources._advisory_lookups["suffix"]
            lookup._lookup = FailingSource(lookup._lookup)
            bench.check(lookup._lookup, method)


def test_interrupt_is_not_a_failure(bench: FaultHarness) -> None:
    def interrupt(children: Children) -> Children:
        raise KeyboardInterrupt

    bench.drafter.fail("expand", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.engine.generate(PROMPT, PARAMS[0])
    bench.drafter.fail("")
    assert bench.engine.generate(PROMPT, PARAMS[0]).token_ids == bench.expected[0]


@pytest.mark.exhaustive
def test_draft_stops_at_the_end_of_its_context(tmp_path: Path) -> None:
    """After its last position it proposes nothing, and there is no notice."""
    target = write_model(tmp_path / "target", num_hidden_layers=3, max_position_embeddings=256)
    draft = write_model(tmp_path / "draft", num_hidden_layers=3, max_position_embeddings=40)
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    with tiny_engine(target, "none") as engine:
        expected = engine.generate(PROMPT, params).token_ids
    heard = list[Event]()
    with tiny_engine(target, draft, budget=16, width=4, notify=heard.append) as engine:
        events = list(engine.stream(PROMPT, params))
        assert engine.generate([*PROMPT, 3, 8], params).finish_reason == "length"
        assert engine.generate(PROMPT, params).token_ids == expected, "it drafts again from the beginning"
    stats = [event for event in events if isinstance(event, PassStats)]
    assert sum(one.emitted for one in stats) == 90
    assert stats[0].tree_nodes > 1 and stats[-1].tree_nodes == 1
    assert not [event for event in heard if isinstance(event, Notice)]


def test_end_tokens_have_no_children() -> None:
    subtree = Subtree([-1, 0, 1, -1], [5, 7, 8, 9], [-0.1, -0.1, -0.1, -3.0])
    closed = subtree.pruned(frozenset({5}))
    assert (closed.parent, closed.token, closed.log_prob) == ([-1, -1], [5, 9], [-0.1, -3.0])
    assert subtree.pruned(frozenset({6})) is subtree
    chain = Subtree([-1, 0, 1, 1], [3, 4, 5, 6], [-1.0, -1.0, -1.0, -1.0]).pruned(frozenset({5}))
    assert (chain.parent, chain.token) == ([-1, 0, 1, 1], [3, 4, 5, 6])


@pytest.mark.parametrize("draft", ["self", "self,suffix"])
def test_trees_stop_at_end_tokens(folder: Path, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly every token of this vocabulary ends the answer, so trees would continue below such tokens."""
    ends = frozenset(range(10, 70))
    grown = list[Any]()
    with tiny_engine(folder, draft, budget=64, width=8) as engine:
        engine._assembly.codec.eos_ids = ends
        run = PassRunner._run

        def watched(*args: Any) -> Any:
            done = run(*args)
            grown.extend(done)
            return done

        monkeypatch.setattr(PassRunner, "_run", watched)
        for prompt in (PROMPT, [5, 6, 5, 6, 5], [1, 2, 3]):
            engine.generate(prompt, SamplingParams(max_tokens=12, temperature=0.9, seed=1))
    trees = [done.grown.tree for done in grown]
    assert sum(len(tree) for tree in trees) > 3 * len(trees)
    for tree in trees:
        parents = {int(parent) for parent in tree.parent.tolist() if parent > 0}
        assert not {int(tree.token[parent]) for parent in parents} & ends
