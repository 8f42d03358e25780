"""Events during an answer, and answers that are halted early."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offspec import ClosedError, RequestError, StreamError
from offspec.core.events import Event, Finished, PassProgress, PassStats, Result, TextDelta, TreeSeen
from offspec.engine.engine import Engine
from offspec.engine.pass_runner import PassRunner
from offspec.engine.sequence import RunningSequence
from offspec.engine.sequence_pass import SequencePass
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.tiny_models import tiny_engine

PARAMS = replace(sampling(1.0, 40), seed=11)  # with this seed, no special token is emitted
SPECIAL = ("<pad>", "<bos>", "<eos>")  # omitted from text, but shown in trees
TIERS = Placement((Tier.DISK, Tier.HOST, Tier.DEVICE, Tier.DISK), 2, 2)


@pytest.fixture(scope="module")
def model(trio: TargetAndDrafts) -> Path:
    return trio.target


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[int, ...]:
    return generate_tokens(model, PARAMS)[0]


class Striker:
    """Sets its event at the n-th moment; a moment is an event of `notify` or of the stream."""

    def __init__(self, moment: int) -> None:
        self.halt = threading.Event()
        self._left = moment

    def count(self, event: Event) -> None:
        self._left -= 1
        if self._left < 0:
            self.halt.set()


def _halted(engine: Engine, striker: Striker) -> tuple[Result, str]:
    shown = ""
    for event in engine.stream(PROMPT, PARAMS, halt=striker.halt):
        striker.count(event)
        if isinstance(event, TextDelta):
            shown += event.text
        if isinstance(event, Finished):
            return event.result, shown
    raise AssertionError("a stream ends with Finished")


@pytest.mark.parametrize(("draft", "placement"), [("auto", TIERS), ("none", None)])
def test_halted_at_any_moment(
    model: Path, expected: tuple[int, ...], draft: str, placement: Placement | None
) -> None:
    """A halted answer is a prefix of the whole answer; the next answer is complete and reuses the prefix."""
    striker, lengths = Striker(10**9), set()
    given: dict[str, Any] = {"placement": placement, "notify": lambda event: striker.count(event)}
    with tiny_engine(model, draft, budget=1 if draft == "none" else 16, width=4, **given) as engine:
        for moment in (0, 2, 5, 13, 34):
            striker = Striker(moment)
            result, shown = _halted(engine, striker)
            assert result.token_ids == expected[: result.tokens]
            assert result.finish_reason == ("halted" if result.tokens < len(expected) else "length")
            assert result.text == shown
            lengths.add(result.tokens)
            if moment % 2:
                striker = Striker(10**9)
                assert engine.generate(PROMPT, PARAMS).token_ids == expected
    assert len(lengths) > 2 and 0 in lengths


def test_halting_breaks_a_pass_off_between_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are halted between chunks of a long prompt, too, without waiting for the end of the pass."""
    layers = list[int]()
    halt = threading.Event()

    def notify(event: Event) -> None:
        if isinstance(event, PassProgress):
            layers.append(event.layer)
            if event.layer == 2:
                halt.set()

    with tiny_engine(model, "none", budget=1, placement=TIERS, notify=notify) as engine:
        events = list(engine.stream(PROMPT, PARAMS, halt=halt))
        assert layers == [0, 0, 1, 2]  # drafting, grown, and two layers
        assert isinstance(events[-1], Finished) and events[-1].result.tokens == 0
        chunks = list[int]()

        def between() -> None:
            chunks.append(1)

        runner = engine._assembly.target.tree_model
        runner.chunk = 2
        halt.clear()
        layers.clear()
        real = SequencePass.rows

        def watched(*args: Any) -> Any:
            runner.check_cancelled = between
            return real(*args)

        monkeypatch.setattr(SequencePass, "rows", watched)
        list(engine.stream([*PROMPT, 7, 8, 9], PARAMS, halt=halt))
        assert len(chunks) > 4 * 4, "no look between the chunks of a layer"


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(("draft", "budget"), [("none", 1), ("good", 24)])
def test_events_of_an_answer(model: Path, draft: str, budget: int) -> None:
    told, placement = list[Event](), Placement((Tier.DISK,) * 4, 2)
    guesses = model if draft == "good" else draft
    with tiny_engine(model, guesses, budget=budget, placement=placement, notify=told.append) as engine:
        events = list(engine.stream(PROMPT, PARAMS, trees=True))
    result = events[-1].result if isinstance(events[-1], Finished) else None
    assert result is not None
    deltas = [event for event in events if isinstance(event, TextDelta)]
    trees = [event for event in events if isinstance(event, TreeSeen)]
    stats = [event for event in events if isinstance(event, PassStats)]
    assert len(trees) == len(stats) == result.passes
    for delta, tree, done in zip(deltas, trees, stats, strict=True):
        assert "".join(piece.text for piece in delta.pieces) == delta.text
        sources = Counter(piece.source for piece in delta.pieces)
        assert sources["bonus"] <= (1 if tree.bonus else 0) and sources["draft"] <= done.emitted
        assert len(tree.parent) == len(tree.text) == len(tree.probability) == done.tree_nodes
        assert [tree.parent[node] for node in tree.accepted] == [-1, *tree.accepted[:-1]]
        said = " ".join([*(tree.text[node] for node in tree.accepted[1:]), tree.bonus]).split()
        assert [word for word in said if word not in SPECIAL] == delta.text.split()
        assert max(tree.probability) == tree.probability[0] == 1
        assert done.wait_seconds + done.compute_seconds <= done.target_seconds
        assert done.compute_seconds > 0
    assert [tree.index for tree in trees] == [done.index for done in stats]
    passes = [event for event in told if isinstance(event, PassProgress)]
    assert {event.index for event in passes} == {done.index for done in stats}
    for done in stats:
        mine = [event for event in passes if event.index == done.index]
        assert [event.layer for event in mine] == [0, 0, 1, 2, 3, 4]
        assert [event.nodes for event in mine] == [0, *[done.tree_nodes] * 5]
        assert all(a.bytes_streamed <= b.bytes_streamed for a, b in pairwise(mine))
        assert all(a.seconds <= b.seconds for a, b in pairwise(mine))


def test_a_fault_gives_out_what_was_held_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of committed tokens is emitted at a halt, even if it might have become a stop string."""
    with tiny_engine(model, "none", budget=1) as engine:
        whole = engine.generate(PROMPT, PARAMS)
        third = whole.text.split()[2]
        params = replace(PARAMS, stop=(third + " never said",))
        events, shown = engine.stream(PROMPT, params), ""
        with pytest.raises(StreamError):
            for event in events:
                if isinstance(event, TextDelta):
                    shown += event.text
                if isinstance(event, PassStats) and event.index == 3:
                    assert not shown.split()[2:], "it is not held back"
                    monkeypatch.setattr(PassRunner, "_run", _broken)
        assert shown.split() == whole.text.split()[:3]


def test_a_halted_check_reports_no_mismatches(model: Path) -> None:
    halt, passes = threading.Event(), list[int]()

    def notify(event: Event) -> None:
        if isinstance(event, PassProgress) and event.layer == 0:
            passes.append(event.index)
            if passes.count(1) > 2:
                halt.set()

    with tiny_engine(model, "none", budget=1, notify=notify) as engine:
        *_, last = engine.stream(PROMPT, PARAMS, check=True, halt=halt)
        assert isinstance(last, Finished) and last.result.mismatches is None
        assert last.result.tokens == PARAMS.max_tokens


def _broken(*args: object) -> None:
    raise StreamError("broken", file="weights", offset=0)


def test_closing_halts_an_answer_in_another_thread(
    model: Path, hold_passes: Callable[[int], threading.Event]
) -> None:
    """The answer is either being computed, or queued for a reader that has stopped reading."""
    for read_on in (True, False):
        gate = hold_passes(1)
        begun, results = threading.Event(), list[Event]()
        engine = tiny_engine(model, "none", budget=1)

        def read(engine: Engine = engine, begun: threading.Event = begun, read_on: bool = read_on) -> None:
            for event in engine.stream(PROMPT, replace(PARAMS, max_tokens=200)):
                results.append(event)  # noqa: B023
                if isinstance(event, PassStats):
                    begun.set()
                    if not read_on:
                        return

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        engine.close()
        gate.set()
        thread.join(60)
        assert not thread.is_alive()
        ended = results[-1]
        assert not isinstance(ended, Finished) or ended.result.finish_reason == "halted"
        with pytest.raises(ClosedError):
            engine.generate(PROMPT)


def test_a_stream_may_move_between_threads(model: Path) -> None:
    """The thread that read last gets an error instead of waiting for itself; other threads wait."""
    with tiny_engine(model, "none") as engine, ThreadPoolExecutor(2) as pool:
        events = engine.stream(PROMPT, PARAMS)
        pool.submit(next, events).result()
        pool.submit(lambda: [next(events) for _ in range(3)]).result()
        next(events)
        with pytest.raises(RequestError, match="another answer of this engine is running"):
            engine.generate(PROMPT, PARAMS)
        later = pool.submit(engine.generate, [3, 4], PARAMS)
        whole = list(events)
        assert isinstance(whole[-1], Finished)
        assert later.result(timeout=60).tokens


def test_a_check_compares_where_answers_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_engine(model, "none") as engine:
        real = engine._begin

        def shorter(answer: Any, *given: Any) -> RunningSequence:
            if not answer.request.trees:  # the check asks for none
                params = replace(answer.request.params, max_tokens=5)
                answer.request = replace(answer.request, params=params)
            return real(answer, *given)

        monkeypatch.setattr(engine._scheduler, "_begin", shorter)
        *_, last = engine.stream(PROMPT, PARAMS, check=True, trees=True)
        assert isinstance(last, Finished) and last.result.mismatches is not None
        (place,) = last.result.mismatches
        assert (place.index, place.unspeculated_token) == (5, None)
        assert place.token == last.result.token_ids[5]
