"""Questions, answers, the queue, interruptions, and errors."""

from dataclasses import replace

import pytest
from textual.message import Message
from textual.pilot import Pilot

from offspec.core.config import SamplingParams
from offspec.core.errors import DraftError, RequestError
from offspec.core.events import PassProgress
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.engine_thread import AnswerDone
from tests.support.fake_engine import PassGate, Script, ScriptedLoad
from tests.ui.tui.stage import PlannedEngine, ask, hold, loaded, plays, said, seen, send, until, until_seen

LONG = " ".join(f"word{i}" for i in range(40))


@plays("one", "two", loads=False)
async def test_questions_are_queued(pilot: Pilot[None], app: ChatApp, engine: PlannedEngine) -> None:
    await send(pilot, "first")
    await send(pilot, "second")
    assert said(app) == [("question", "first"), ("question", "second")]
    assert seen(app).count("⋯ queued") == 2
    assert not engine.requests and isinstance(app.opener, ScriptedLoad)
    app.opener.gate.set()
    await until(pilot, lambda: len(engine.requests) == 2 and app.answer is None)
    assert said(app) == [("question", "first"), ("answer", "one"), ("question", "second"), ("answer", "two")]
    assert "waits" not in seen(app)


@plays(LONG)
async def test_escape_stops_immediately_and_keeps_the_partial_answer(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    for passes, at, doing in (
        (0, PassProgress(1, 64, 4, 8, 10**9, 0.5), "reading the prompt"),
        (1, PassProgress(2, 0, 0, 8, 0, 0.1), "drafting"),
        (2, PassProgress(3, 64, 4, 8, 10**9, 0.5), "layer 4/8"),
    ):
        engine.gate = PassGate(passes)
        await hold(pilot, engine, "Count.")
        engine.notify(at)
        await until_seen(pilot, doing)
        await pilot.press("escape")
        await until(pilot, lambda: app.answer is None)
        assert app.controller is not None
        answer = app.controller.session.messages[-1]
        assert answer.finish == "halted"
        assert answer.content == " ".join(LONG.split()[: 4 * passes])
        assert said(app)[-2:] == [("question", "Count."), ("answer", answer.content)]
        await until(pilot, lambda: "⋯ stopped" in seen(app))
        await send(pilot, "/clear")
        await until(pilot, lambda: not any(kind == "answer" for kind, _ in said(app)))


@plays(LONG, passes=1)
async def test_escape_returns_queued_questions_to_the_composer(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await loaded(pilot)
    await send(pilot, "/hlep")
    await hold(pilot, engine, "first")
    await send(pilot, "/clear")
    await until(pilot, lambda: "stop the answer first" in seen(app))
    assert "did you mean /help?" in said(app)[0][1]
    await send(pilot, "second")
    await send(pilot, "third")
    app.user_input.stopping = True
    await send(pilot, "/clear")
    await until(pilot, lambda: app.user_input.next_command == "/clear")
    await pilot.press("escape")
    await until(pilot, lambda: app.answer is None)
    assert app.composer.text == "second\nthird"
    assert [kind for kind, _ in said(app)] == ["error", "question", "answer", "error"]
    assert len(engine.requests) == 1


@plays(Script(LONG, fail_after=1), "Now it works.")
async def test_error_during_an_answer_names_a_remedy_and_keeps_the_chat_usable(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    engine.gate.clear()
    await loaded(pilot)
    await send(pilot, "Count.")
    await send(pilot, "second")
    engine.gate.set()
    await until(pilot, lambda: app.answer is None and bool(app.composer.text))
    assert app.composer.text == "second" and len(engine.requests) == 1  # the queue is not sent
    for text in ("word0 word1 word2 word3", "ended by an error", "Input/output error", "/retry"):
        assert text in seen(app)
    app.composer.clear()
    await pilot.press("ctrl+r")
    await until(pilot, lambda: app.answer is None and "Now it works." in seen(app))
    assert said(app) == [("question", "Count."), ("answer", "Now it works.")]


@plays(Script("x", fail_after=0, error=RequestError("not so")))
async def test_refused_question_returns_to_the_composer(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await loaded(pilot)
    context, engine.context = engine.context, 3
    await send(pilot, "a question of too many words")
    await until(pilot, lambda: any("the context has room for 3" in text for _, text in said(app)))
    assert app.composer.text == "a question of too many words"
    assert [kind for kind, _ in said(app)] == ["error"]
    assert app.controller is not None
    assert app.controller.session.messages == ()
    engine.context = context
    await send(pilot, "first")
    await until(pilot, lambda: "not so" in seen(app))
    assert "/retry" not in seen(app)  # a refusal before the first pass is not an error


@plays("one", "two", "three")
async def test_undo_and_edit_remove_turns(pilot: Pilot[None], app: ChatApp, engine: PlannedEngine) -> None:
    await ask(pilot, "first", "second")
    before = said(app)
    await send(pilot, "/edit")
    await until(pilot, lambda: app.composer.text == "/edit second")
    await pilot.press("escape")
    assert app.composer.text == "" and said(app) == before
    assert app.controller is not None and not app.controller.session.branches
    await send(pilot, "/edit")
    await until(pilot, lambda: app.composer.text == "/edit second")
    await pilot.press(*"!", "enter")
    await until(pilot, lambda: app.answer is None and said(app)[-1] == ("answer", "three"))
    assert said(app)[2:] == [("question", "second!"), ("answer", "three")]
    await send(pilot, "/undo")
    await until(pilot, lambda: said(app) == before)
    engine.context = 30
    await send(pilot, "/edit " + "word " * 40)  # is refused, and the turn returns
    await until(pilot, lambda: "the context has" in seen(app))
    assert said(app)[:-1] == before and said(app)[-1][0] == "error"
    assert app.composer.text == "/edit " + ("word " * 40).strip()
    await send(pilot, "/undo 1")
    await until(pilot, lambda: said(app) == before[:2])


@plays("one", "two", "three")
async def test_arrows_switch_between_versions_of_an_answer(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "first", "second")
    await pilot.press("left")  # there is only one
    await pilot.press("ctrl+r")
    await until(pilot, lambda: app.answer is None and "← 2 of 2" in seen(app))
    assert said(app)[-1] == ("answer", "three")
    await pilot.press("left")
    await until(pilot, lambda: "1 of 2 →" in seen(app))
    assert said(app) == [("question", "first"), ("answer", "one"), ("question", "second"), ("answer", "two")]
    await pilot.press(
        "left", "x", "left", "right", "backspace"
    )  # there is no earlier one; in a text the cursor moves
    await until(pilot, lambda: app.composer.text == "")
    assert "1 of 2 →" in seen(app) and "← 1" not in seen(app)
    await pilot.press("right")
    await until(pilot, lambda: "← 2 of 2" in seen(app))
    lines = seen(app).splitlines()
    row = next(number for number, text in enumerate(lines) if "← 2 of 2" in text)
    await pilot.click(offset=(lines[row].index("←"), row))
    await until(pilot, lambda: "1 of 2 →" in seen(app))
    assert said(app)[-1] == ("answer", "two")


@plays("one", LONG, passes=1)
async def test_stopped_retry_shows_the_previous_answer(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await ask(pilot, "first")
    await pilot.press("ctrl+r")
    await until(pilot, engine.at_gate.is_set)
    await pilot.press("escape")
    await until(pilot, lambda: app.answer is None and "No new answer" in seen(app))
    assert said(app)[:2] == [("question", "first"), ("answer", "one")]
    assert "2 of" not in seen(app)


@pytest.mark.parametrize("stopped", [True, False], ids=["after escape", "without"])
@plays(LONG, "Another.", passes=1)
async def test_retry_in_the_last_frame_of_an_answer(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine, stopped: bool
) -> None:
    """The session is done with the answer, but the screen has not been notified yet."""
    ends: list[Message] = []

    await loaded(pilot)
    assert app.engine is not None and app.controller is not None
    post = app.engine._post
    app.engine._post = lambda message: (
        ends.append(message) if isinstance(message, AnswerDone) else post(message)
    )
    await hold(pilot, engine, "first")
    if stopped:
        await pilot.press("escape")
    else:
        engine.gate.set()
    await until(pilot, lambda: bool(ends))
    assert not app.controller.session.busy
    app.engine._post = post
    await pilot.press("ctrl+r", "ctrl+r")
    await pilot.pause()
    assert len(engine.requests) == 1 and app.answer is not None
    engine.gate.set()
    app.post_message(ends[0])
    if stopped:
        await until(pilot, lambda: app.answer is None and ("answer", "Another.") in said(app))
        assert said(app) == [("question", "first"), ("answer", "Another.")]
    else:
        await until(pilot, lambda: app.answer is None)
        assert "stop the answer first" in said(app)[-1][1]
    app.post_message(ends[0])  # nothing waits for it
    await ask(pilot, "second")


@plays("one", failing=["bad/draft"])
async def test_chat_continues_if_a_draft_or_the_model_fails_to_load(pilot: Pilot[None], app: ChatApp) -> None:
    assert isinstance(app.opener, ScriptedLoad)
    await ask(pilot, "first")
    await send(pilot, "/draft bad/draft")
    await until(pilot, lambda: ("notice", "the draft is self (4-bit)") in said(app))
    assert (
        "notice",
        "bad/draft has another vocabulary; loading the model again with its previous settings",
    ) in said(app)
    await ask(pilot, "second")
    assert said(app)[-2:] == [("question", "second"), ("answer", "one")]
    app.opener.fail = DraftError("the disk is away")
    app.opener.gate.clear()
    await send(pilot, "/draft none")
    await send(pilot, "third")
    app.opener.gate.set()
    await until(pilot, lambda: "/draft auto, loads it again" in said(app)[-1][1])
    assert app.composer.text == "third" and ("question", "third") not in said(app)
    app.composer.clear()
    await send(pilot, "third")
    await until(pilot, lambda: "no model is loaded" in said(app)[-1][1])
    assert app.composer.text == "third" and ("question", "third") not in said(app)
    app.opener.fail = None
    await send(pilot, "/draft auto")
    await until(pilot, lambda: not app.is_loading and app.controller is not None and app.controller.is_open)
    await ask(pilot, "third")
    assert said(app)[-2:] == [("question", "third"), ("answer", "one")]


@plays("one two three", size=(100, 30))
async def test_title_and_context_meter_follow_the_conversation(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Why is the sky so very blue today?")
    assert app.controller is not None
    used = app.controller.session.used
    meter = f"{used} of 4,096 tokens"
    assert meter in seen(app).split("\n")[-2]
    await send(pilot, "/save Two words")
    await until(pilot, lambda: "Saved as" in seen(app))
    lines = seen(app).split("\n")
    assert "Two words" in lines[0] and "Two words" in "".join(line[66:] for line in lines)
    await send(pilot, "/clear")
    await until(pilot, lambda: "0 of 4,096 tokens" in seen(app).split("\n")[-2])
    await send(pilot, "/load Two words")
    await until(pilot, lambda: meter in seen(app).split("\n")[-2])
    await send(pilot, "/system Be kind, and brief.")
    await until(pilot, lambda: f"{used + 6} of 4,096 tokens" in seen(app).split("\n")[-2])
    await send(pilot, "/system none")
    await until(pilot, lambda: meter in seen(app).split("\n")[-2])
    await send(pilot, "/draft none")
    await until(pilot, lambda: ("notice", "the draft is none") in said(app))
    await until(pilot, lambda: meter in seen(app).split("\n")[-2])


@plays("one", loads=False)
async def test_settings_made_while_loading_apply_to_the_first_answer(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await send(pilot, "/set temperature=0.7")
    await send(pilot, "Why?")
    await send(pilot, "/set top_k=5 seed=3")
    await send(pilot, "/set top_q=5")
    await send(pilot, "/set temperature")
    await send(pilot, "/help set")
    await until(pilot, lambda: len(said(app)) == 6)
    replies = [text for kind, text in said(app) if kind != "question"]
    assert "temperature` is `0.7`" in replies[0] and "top_k` is `5`" in replies[1]
    assert "unknown parameter 'top_q'" in replies[2] and "`temperature` is `0.7`: " in replies[3]
    assert "| `top_k` | `5` |" in replies[4]
    app.composer.set_text("/set seed=r")
    await until(pilot, lambda: "/set seed=random" in seen(app))
    app.composer.clear()
    assert not engine.requests and isinstance(app.opener, ScriptedLoad)
    app.opener.gate.set()
    await until(pilot, lambda: len(engine.requests) == 1 and app.answer is None)
    assert engine.requests[0].params == replace(app.defaults(), temperature=0.7, top_k=5, seed=3)
    assert app.controller is not None and app.controller.session.params == engine.requests[0].params
    app.opener.gate.clear()
    await send(pilot, "/set temperature=0.3")  # earlier settings do not overwrite it
    await send(pilot, "/draft none")
    await until(pilot, lambda: app.is_loading)
    await send(pilot, "/set top_p=0.5")  # added to the others
    await until(pilot, lambda: "top_p` is `0.5`" in said(app)[-1][1])
    app.opener.gate.set()
    await until(pilot, lambda: not app.is_loading)
    assert app.controller.session.params == replace(engine.requests[0].params, temperature=0.3, top_p=0.5)


@plays("one", loads=False)
async def test_sampling_defaults_of_the_model_apply_after_loading(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    engine.sampling_defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    await send(pilot, "/set top_k=0")  # as shown already
    await send(pilot, "/set top_p")
    await until(pilot, lambda: len(said(app)) == 2)
    assert said(app)[0][1] == "From the next answer on, `top_k` is `0`."
    assert said(app)[1][1].endswith("Other parameters get the model's defaults once it is loaded.")
    assert isinstance(app.opener, ScriptedLoad)
    app.opener.gate.set()
    await loaded(pilot)
    line = "temperature 0.5, top_p 0.9, top_k 20 (from generation_config.json and options)"
    await until(pilot, lambda: ("notice", f"Sampling defaults: {line}; /set changes them.") in said(app))
    assert app.params() == replace(app.defaults(), top_k=0) and app.params().top_p == 0.9
    await send(pilot, "/set top_k=default")
    await until(pilot, lambda: app.params().top_k == 20)


@plays("one", "two")
async def test_identical_retry_suggests_a_temperature(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await send(pilot, "/set temperature=0")
    await ask(pilot, "Why?")
    app.composer.set_text("half a question")
    await pilot.press("ctrl+r")
    await until(pilot, lambda: app.composer.text == "/retry 0.7")
    assert "always gets the same answer" in said(app)[-1][1] and "Enter sends it" in seen(app)
    await pilot.press("escape")
    assert app.composer.text == "half a question"
    app.composer.clear()
    await pilot.press("ctrl+r")
    await until(pilot, lambda: app.composer.text == "/retry 0.7")
    await pilot.press("enter")
    await until(pilot, lambda: app.answer is None and ("answer", "two") in said(app))
    assert ("answer", "one") not in said(app)
