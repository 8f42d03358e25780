"""Every command, in every state of a desk: nothing said, idle, busy, after an error."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.archive import Archive
from offspec.chatting.commands import COMMANDS
from offspec.chatting.desk import Desk
from offspec.chatting.opening import Setup
from offspec.chatting.outcomes import Answer, Copy, Open, Quit, Reload, Reset, Rewound, Say, Sources
from offspec.config import EngineConfig, SamplingParams
from offspec.conversation import Conversation
from offspec.errors import DraftError, OffspecError, RequestError, SessionError, StreamError
from offspec.events import Event, Finished, Notice, TreeSeen
from tests.chat.scripted import Script, ScriptedEngine
from tests.planners import samples

SETUP = Setup(EngineConfig("demo"), SamplingParams(max_tokens=100))
ANSWER = "The sky is blue because of scattering."


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "sessions")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([ANSWER])


@pytest.fixture
def desk(engine: ScriptedEngine, archive: Archive) -> Iterator[Desk]:
    desk = Desk(engine, SETUP, archive)
    engine.notify = desk.hear
    yield desk
    desk.close()
    assert engine.closed


def say(desk: Desk, text: str) -> str:
    """The text of the answer."""
    return finished(desk.ask(text))


def finished(events: Iterator[Event]) -> str:
    last = list(events)[-1]
    assert isinstance(last, Finished)
    return last.result.text


def said(desk: Desk) -> list[str]:
    return [message.content for message in desk.session.messages]


def shown(desk: Desk, line: str) -> str:
    outcome = desk.run(line)
    assert isinstance(outcome, Say)
    return outcome.markdown


# Nothing said yet


@pytest.mark.parametrize(
    "line", ["/retry", "/edit", "/edit Why?", "/undo", "/undo 3", "/save", "/save name", "/copy"]
)
def test_there_must_be_something_first(desk: Desk, line: str) -> None:
    with pytest.raises(RequestError, match="yet"):
        desk.run(line)


def test_looking_around_before_anything_is_said(desk: Desk) -> None:
    assert desk.run("/help") == Open("help")
    assert desk.run("/stats") == Open("stats")
    assert desk.run("/sessions") == desk.run("/load") == Open("sessions")
    assert desk.run("/quit") == Quit()
    assert "no tree yet" in shown(desk, "/tree")
    assert "no plan" in shown(desk, "/plan")
    assert "substitute (4-bit)" in shown(desk, "/draft")
    assert isinstance(desk.run("/clear"), Reset)
    assert not list(desk.archive.folder.glob("*"))  # nothing was said, so nothing is kept


def test_a_plan_is_shown_where_there_is_one(archive: Archive) -> None:
    assert Desk(ScriptedEngine(plan=samples.small()), SETUP, archive).run("/plan") == Open("plan")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.takes_argument])
def test_what_takes_nothing_says_so(desk: Desk, name: str) -> None:
    with pytest.raises(RequestError, match=f"/{name} takes nothing after it"):
        desk.run(f"/{name} now")


# Idle, with something said


def test_an_answer_is_followed_and_kept(desk: Desk, archive: Archive) -> None:
    assert say(desk, "//help, please?") == ANSWER
    assert said(desk) == ["//help, please?", ANSWER]
    assert [entry.title for entry in archive.list()] == ["//help, please?"]
    assert desk.trees[-1].index == 2
    assert desk.figures.answer.tokens == 7
    assert desk.run("/tree") == Open("tree")


def test_a_question_is_said_as_it_is_and_handed_back_as_it_is_typed(desk: Desk) -> None:
    say(desk, "/quit now")
    assert said(desk)[0] == "/quit now"
    finished(desk.run("/edit //help me").events)  # type: ignore[union-attr]
    assert said(desk)[0] == "/help me"
    outcome = desk.run("/edit")
    assert isinstance(outcome, Rewound) and outcome.text == "//help me"


def test_trees_are_gathered_only_where_wanted(engine: ScriptedEngine, archive: Archive) -> None:
    desk = Desk(engine, replace(SETUP, trees=False), archive)
    assert not any(isinstance(event, TreeSeen) for event in desk.ask("Why?"))
    assert not desk.trees


def test_retry(desk: Desk) -> None:
    say(desk, "Why?")
    before = desk.session.messages[-1]
    outcome = desk.run("/retry")
    assert isinstance(outcome, Answer) and outcome.question is None and outcome.dropped == (before,)
    assert finished(outcome.events) == ANSWER
    assert said(desk) == ["Why?", ANSWER]


def test_edit_with_a_text_asks_in_place_of_the_last_question(desk: Desk) -> None:
    say(desk, "First?")
    say(desk, "Why?")
    outcome = desk.run("/edit Why not?")
    assert isinstance(outcome, Answer) and outcome.question == "Why not?"
    assert [message.content for message in outcome.dropped] == ["Why?", ANSWER]
    finished(outcome.events)
    assert said(desk) == ["First?", ANSWER, "Why not?", ANSWER]


def test_an_edit_that_is_refused_changes_nothing(desk: Desk, engine: ScriptedEngine) -> None:
    say(desk, "First?")
    say(desk, "Why?")
    before, engine.context = desk.session.messages, 60
    outcome = desk.run("/edit " + "word " * 100)
    assert isinstance(outcome, Answer) and outcome.dropped == before[2:]
    with pytest.raises(RequestError, match="context"):
        list(outcome.events)
    assert desk.session.messages == before
    assert Conversation.read(desk.file).messages == list(before)


def test_edit_alone_hands_the_question_back(desk: Desk) -> None:
    say(desk, "Why?\nTell me.")
    outcome = desk.run("/edit")
    assert isinstance(outcome, Rewound) and outcome.text == "Why?\nTell me."
    assert said(desk) == []


def test_undo(desk: Desk) -> None:
    for question in ("One?", "Two?", "Three?"):
        say(desk, question)
    outcome = desk.run("/undo")
    assert isinstance(outcome, Rewound) and outcome.text is None
    assert said(desk) == ["One?", ANSWER, "Two?", ANSWER]
    with pytest.raises(RequestError, match="only 2 questions have been asked; /undo 2"):
        desk.run("/undo 3")
    for wrong in ("0", "00", "-1", "all", "²"):
        with pytest.raises(RequestError, match="no number above 0"):
            desk.run(f"/undo {wrong}")
    with pytest.raises(RequestError, match="only 2 questions"):
        desk.run("/undo " + "9" * 5000)  # more digits than Python reads
    assert len(desk.run("/undo 2").dropped) == 4  # type: ignore[union-attr]
    assert said(desk) == []


def test_system(desk: Desk) -> None:
    assert "no system message" in shown(desk, "/system")
    assert "whole conversation" not in shown(desk, "/system Be brief.")
    assert shown(desk, "/system").endswith("Be brief.")
    say(desk, "Why?")
    assert "whole conversation" in shown(desk, "/system none")
    assert desk.session.system is None


def test_set_shows_everything_and_one(desk: Desk) -> None:
    text = shown(desk, "/set")
    for name in SamplingParams.__dataclass_fields__:
        assert f"| `{name}` |" in text
    assert shown(desk, "/set top-p").startswith("`top_p` is `1`: ")


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("temperature=0.7 top_p=0.9", {"temperature": 0.7, "top_p": 0.9}),
        ("temperature 0.7", {"temperature": 0.7}),
        ("Max-Tokens=1,000", {"max_tokens": 1000}),
        ("seed=7", {"seed": 7}),
        ("ignore_eos=on", {"ignore_eos": True}),
        ('stop="The end" stop="\\n\\n"', {"stop": ("The end", "\n\n")}),
        (r"stop=\n stop=a\tb", {"stop": ("\n", "a\tb")}),
        ("stop=### stop='say \"so\"'", {"stop": ("###", 'say "so"')}),
    ],
)
def test_set_changes(desk: Desk, line: str, changes: dict[str, Any]) -> None:
    assert shown(desk, f"/set {line}").startswith("From the next answer on ")
    assert desk.session.params == replace(SETUP.params, **changes)
    assert shown(desk, f"/set {line}") == "Nothing changes: it was set so already."
    name = next(iter(changes))
    shown(desk, f"/set {name}=default")
    assert getattr(desk.session.params, name) == getattr(SETUP.params, name)
    shown(desk, "/set default")
    assert desk.session.params == SETUP.params


def test_set_none_and_random_take_away(desk: Desk) -> None:
    shown(desk, "/set stop=END seed=7")
    shown(desk, "/set stop=none seed=random")
    assert desk.session.params.stop == () and desk.session.params.seed is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("temperature=hot", "temperature is a number, not 'hot'"),
        ("temperature=-1", "temperature must be 0 or above, not -1.0"),
        ("top_p=2", "top_p must be above 0 and at most 1"),
        ("top_k=1.5", "top_k is a whole number"),
        ("max_tokens=0", "max_tokens must be 1 or above"),
        ("seed=-1", "seed must be between 0"),
        ("seed=x", "a whole number or random"),
        ("ignore_eos=maybe", "on or off"),
        ("temprature=1", "the nearest is temperature"),
        ("colour=red", "there are temperature, top_p"),
        ("temperature = 0.7", "no space around"),
        ("temperature=", "no space around"),
        ('stop="open', "a quote is left open"),
    ],
)
def test_set_refuses_and_changes_nothing(desk: Desk, line: str, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        desk.run(f"/set {line}")
    with pytest.raises(RequestError):
        desk.run(f"/set min_p=0.5 {line}")
    assert desk.session.params == SETUP.params


def test_seed(desk: Desk) -> None:
    assert "A fresh seed is drawn" in shown(desk, "/seed")
    assert "The seed is 11" in shown(desk, "/seed 11")
    say(desk, "Why?")
    assert shown(desk, "/seed").startswith("The seed is 11; the last answer had 11.")
    finished(desk.run("/retry").events)  # type: ignore[union-attr]
    assert "the last answer had 12" in shown(desk, "/seed")
    assert "fresh" in shown(desk, "/seed random")
    with pytest.raises(RequestError, match="between 0"):
        desk.run("/seed -5")


def test_seed_leaves_out_answers_that_were_told_none(desk: Desk) -> None:
    say(desk, "Why?")
    question, answer = desk.session.messages
    assert answer.figures is not None
    untold = replace(answer, figures=replace(answer.figures, seed=None))
    desk.session.conversation.change([question, untold])
    assert "the last answer" not in shown(desk, "/seed")


def test_save_and_load_by_name(desk: Desk, archive: Archive) -> None:
    say(desk, "Why?")
    assert "**Holiday plans**" in shown(desk, "/save Holiday plans")
    assert isinstance(desk.run("/clear"), Reset)
    assert said(desk) == []
    say(desk, "Other?")
    with pytest.raises(RequestError, match="another conversation is called 'Holiday plans'"):
        desk.run("/save holiday PLANS")
    outcome = desk.run("/load holiday plans")
    assert outcome == Reset("Going on with 'Holiday plans': one question so far.")
    assert not desk.trees
    say(desk, "And?")
    assert {entry.title: entry.turns for entry in archive.list()} == {"Holiday plans": 2, "Other?": 1}
    with pytest.raises(SessionError, match="no session 'nowhere'"):
        desk.run("/load nowhere")
    assert len(said(desk)) == 4


def test_save_to_a_file_and_load_it(desk: Desk, tmp_path: Path) -> None:
    say(desk, "Why?")
    file = tmp_path / "copy.json"
    assert str(file) in shown(desk, f"/save {file}")
    say(desk, "And?")
    assert Conversation.read(file).turns == 1
    shown(desk, f"/save {file}")  # the same conversation may be copied over itself
    assert Conversation.read(file).turns == 2
    desk.run("/clear")
    say(desk, "Other?")
    with pytest.raises(RequestError, match="holds another conversation"):
        desk.run(f"/save {file}")
    desk.run(f"/load {file}")
    say(desk, "More?")
    assert Conversation.read(file).turns == 3  # who opens a file goes on in it


def test_save_destroys_nothing(desk: Desk, tmp_path: Path) -> None:
    say(desk, "Why?")
    file = tmp_path / "notes.json"
    file.write_text("{}")
    with pytest.raises(RequestError, match="is no conversation"):
        desk.run(f"/save {file}")
    assert file.read_text() == "{}"
    with pytest.raises(RequestError, match="is a folder"):
        desk.run(f"/save {tmp_path}/")


@pytest.mark.parametrize(
    "path", ["~nobody-of-that-name/copy.json", f"./{'long' * 100}/copy.json", "a\0b.json", "{locked}/copy.json"]
)
def test_paths_that_cannot_be(path: str, desk: Desk, tmp_path: Path) -> None:
    say(desk, "Why?")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    try:
        for name in ("save", "load", "draft"):
            line = f"/{name} {path.format(locked=locked)}"
            with pytest.raises(OffspecError) as error:
                desk.run(line)
            assert "\n" not in str(error.value)
            desk.complete(line)
    finally:
        locked.chmod(0o700)


def test_a_title_is_not_taken_where_it_cannot_be_written(desk: Desk) -> None:
    say(desk, "Why?")
    desk.file.unlink()
    desk.file.mkdir()
    with pytest.raises(OffspecError):
        desk.run("/save Holiday")
    assert desk.session.conversation.title == "Why?"


def test_a_conversation_whose_title_is_not_its_own_is_named_by_its_id(desk: Desk) -> None:
    say(desk, "Why?")
    assert desk.run("/clear") == Reset("A new conversation. `/load Why?` goes on with the one before.")
    say(desk, "why?")
    second = desk.session.conversation.id
    assert desk.run("/clear") == Reset(f"A new conversation. `/load {second}` goes on with the one before.")
    assert isinstance(desk.run(f"/load {second}"), Reset)


def test_a_conversation_with_another_model_says_so(desk: Desk, archive: Archive, tmp_path: Path) -> None:
    say(desk, "Why?")
    other = Conversation(model="other/model", title="Elsewhere", messages=desk.session.conversation.messages)
    archive.save(other)
    outcome = desk.run("/load Elsewhere")
    assert isinstance(outcome, Reset) and "held with other/model; demo goes on" in outcome.note


def test_draft(desk: Desk, tmp_path: Path) -> None:
    assert desk.run("/draft none") == Reload(EngineConfig("demo", draft="none"))
    assert desk.run("/draft some/model") == Reload(EngineConfig("demo", draft="some/model"))
    assert desk.run(f"/draft {tmp_path}") == Reload(EngineConfig("demo", draft=str(tmp_path)))
    assert "already" in shown(desk, "/draft auto")
    for wrong in ("modle", "./modle", "/no/such/model", "~/modle.gguf"):
        with pytest.raises(RequestError, match="there is no model"):
            desk.run(f"/draft {wrong}")


class Openings:
    """An opener that is told what fails, and what it was asked for."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.asked: list[tuple[EngineConfig, Path | None]] = []
        self.engines: list[ScriptedEngine] = []

    def __call__(
        self, config: EngineConfig, plan: Path | None, notify: Callable[[Event], None]
    ) -> ScriptedEngine:
        self.asked.append((config, plan))
        if config.draft in self.failing:
            raise DraftError(f"{config.draft} has another vocabulary")
        # An engine may make more of what it was asked for.
        self.engines.append(ScriptedEngine([ANSWER], config=replace(config, budget=32, width=4)))
        return self.engines[-1]


def test_an_exchange_goes_on_with_the_conversation(desk: Desk, engine: ScriptedEngine) -> None:
    say(desk, "Why?")
    desk.run("/set temperature=0.5")
    opener, none = Openings(), EngineConfig("demo", draft="none")
    desk.exchange(none, opener, desk.hear, pytest.fail)
    assert engine.closed and desk.config == none
    say(desk, "And?")
    assert said(desk) == ["Why?", ANSWER, "And?", ANSWER]
    assert desk.session.params.temperature == 0.5
    assert Conversation.read(desk.file).turns == 2
    assert "already" in shown(desk, "/draft none")
    assert len(opener.engines[0].asked) == 1
    engine.closed = True


def test_what_comes_back_after_a_failed_exchange_follows_its_plan(archive: Archive, tmp_path: Path) -> None:
    plan, opener = tmp_path / "plan.json", Openings("bad/draft")
    desk = Desk.open(replace(SETUP, plan=plan), opener, archive, lambda event: None)
    say(desk, "Why?")
    failures: list[OffspecError] = []
    bad = replace(SETUP.config, draft="bad/draft")
    desk.exchange(bad, opener, desk.hear, failures.append)
    assert opener.asked == [(SETUP.config, plan), (bad, None), (SETUP.config, plan)]
    assert [str(failure) for failure in failures] == ["bad/draft has another vocabulary"]
    say(desk, "And?")
    assert len(said(desk)) == 4 and desk.config == SETUP.config
    desk.close()


def test_an_engine_under_which_there_is_no_desk_is_closed(archive: Archive) -> None:
    opener = Openings()
    with pytest.raises(SessionError):
        Desk.open(replace(SETUP, resume="nowhere"), opener, archive, lambda event: None)
    assert opener.engines[0].closed


def test_sources(desk: Desk) -> None:
    assert [desk.run(f"/sources {word}".strip()) for word in ("", "", "on", "on", "off")] == [
        Sources(shown) for shown in (True, False, True, True, False)
    ]
    with pytest.raises(RequestError, match="on or off"):
        desk.run("/sources maybe")


def test_copy(archive: Archive) -> None:
    engine = ScriptedEngine(["First.", "<think>\nhm\n</think>\n\nSecond."])
    desk = Desk(engine, SETUP, archive)
    say(desk, "One?")
    say(desk, "Two?")
    assert desk.run("/copy") == Copy("Second.", "the last answer")
    assert desk.run("/copy 2") == Copy("First.", "answer 1 of 2")
    with pytest.raises(RequestError, match="only 2 answers"):
        desk.run("/copy 3")


def test_clear_begins_anew_with_the_same_settings(desk: Desk) -> None:
    desk.run("/system Be brief.")
    desk.run("/set top_k=5")
    say(desk, "Why?")
    file = desk.file
    outcome = desk.run("/clear")
    assert outcome == Reset("A new conversation. `/load Why?` goes on with the one before.")
    assert said(desk) == [] and not desk.trees
    assert desk.session.system == "Be brief." and desk.session.params.top_k == 5
    say(desk, "Other?")
    assert desk.file != file and Conversation.read(file).turns == 1


# Busy


def test_what_may_run_while_an_answer_comes(desk: Desk) -> None:
    say(desk, "Before?")
    events = desk.ask("Why?")
    for event in events:
        if isinstance(event, TreeSeen):
            break
    examples = {"set": " top_k=3", "seed": " 5", "help": " set", "save": " A name", "sources": " on"}
    for name, command in COMMANDS.items():
        line = f"/{name}{examples.get(name, '')}"
        if command.while_busy:
            desk.run(line)
            continue
        with pytest.raises(RequestError, match="stop the answer first"):
            desk.run(line)
    desk.stop()
    result = list(events)[-1]
    assert isinstance(result, Finished) and result.result.finish_reason == "halted"
    assert said(desk)[-1] == "The sky is blue"
    assert desk.figures.live_line() == ""


# After an error


def test_after_an_error_everything_works(archive: Archive) -> None:
    engine = ScriptedEngine([Script("one two three four five", fail_after=1), ANSWER])
    desk = Desk(engine, SETUP, archive)
    with pytest.raises(StreamError):
        list(desk.ask("Why?"))
    assert said(desk) == ["Why?", "one two three four"]
    assert desk.run("/copy") == Copy("one two three four", "the last answer")
    outcome = desk.run("/retry")
    assert isinstance(outcome, Answer) and outcome.dropped[0].finish == "failed"
    assert finished(outcome.events) == ANSWER
    assert said(desk) == ["Why?", ANSWER]


def test_a_question_that_is_refused_leaves_no_trace(archive: Archive) -> None:
    desk = Desk(ScriptedEngine(context=8), SETUP, archive)
    for question in ("word " * 20, "  "):
        with pytest.raises(RequestError):
            list(desk.ask(question))
    assert said(desk) == [] and not archive.list()


def test_an_error_before_the_first_pass_can_be_retried(archive: Archive) -> None:
    desk = Desk(ScriptedEngine([Script("x", fail_after=0), ANSWER]), SETUP, archive)
    with pytest.raises(OffspecError):
        list(desk.ask("Why?"))
    outcome = desk.run("/retry")
    assert isinstance(outcome, Answer)
    assert finished(outcome.events) == ANSWER
    assert [content for content in said(desk) if content] == ["Why?", ANSWER]


# Resuming


def test_resume_takes_the_latest_of_this_model(desk: Desk, archive: Archive) -> None:
    desk.run("/system Be brief.")
    desk.run("/set temperature=0.5 top_k=3")
    say(desk, "Why?")
    params = SamplingParams(temperature=0.9, top_k=50)
    setup = replace(SETUP, resume="", params=params, given=frozenset({"temperature"}))
    again = Desk(ScriptedEngine([ANSWER]), setup, archive)
    assert said(again) == said(desk) and again.file == desk.file
    assert again.notes == ["Going on with 'Why?': one question so far."]
    assert again.session.system == "Be brief."
    assert (again.session.params.temperature, again.session.params.top_k) == (0.9, 3)
    assert Desk(ScriptedEngine(), replace(setup, system="Rhyme."), archive).session.system == "Rhyme."


def test_resume_by_name_and_with_nothing_there(desk: Desk, archive: Archive) -> None:
    new = Desk(ScriptedEngine(), replace(SETUP, resume=""), archive)
    assert "new one" in new.notes[0]
    say(desk, "Why?")
    assert said(Desk(ScriptedEngine(), replace(SETUP, resume="why?"), archive)) == ["Why?", ANSWER]
    with pytest.raises(SessionError):
        Desk(ScriptedEngine(), replace(SETUP, resume="nowhere"), archive)


def test_notices_are_noted(desk: Desk) -> None:
    desk.hear(Notice("reads are buffered"))
    assert desk.notes == ["reads are buffered"]


# Completion


def completions(desk: Desk, line: str) -> list[str]:
    return [completion.text for completion in desk.complete(line)]


def test_completion(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completions(desk, "/s") == [
        "/system ",
        "/set ",
        "/seed ",
        "/save ",
        "/sessions",
        "/sources ",
        "/stats",
    ]
    assert len(completions(desk, "/")) == len(COMMANDS)
    assert completions(desk, "/help re") == ["/help retry"]
    assert completions(desk, "/set te") == ["/set temperature="]
    assert completions(desk, "/set top_k=5 top") == ["/set top_k=5 top_p=", "/set top_k=5 top_k="]
    assert completions(desk, "/draft ") == ["/draft auto", "/draft none"]
    assert completions(desk, "/sources o") == ["/sources on", "/sources off"]
    assert completions(desk, "/clear ") == completions(desk, "hello") == completions(desk, "//he") == []
    assert all(completion.help for completion in desk.complete("/"))


def test_conversations_are_looked_for_once_a_line(
    desk: Desk, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(desk, "Why is it so?")
    looked: list[int] = []
    look = archive.list
    monkeypatch.setattr(archive, "list", lambda: (looked.append(1), look())[1])
    for line in ("/load ", "/load w", "/load wh"):
        assert completions(desk, line) == ["/load Why is it so?"]
    assert len(looked) == 1
    assert completions(desk, "/lo") == ["/load "]
    completions(desk, "/load ")
    assert len(looked) == 2
    desk.run("/help")
    completions(desk, "/load ")
    assert len(looked) == 3


def test_completion_of_names_and_files(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(desk, "Why is it so?")
    assert completions(desk, "/load why") == ["/load Why is it so?"]
    for name in ("one.json", "two.gguf", "three.txt", ".hidden.json"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert completions(desk, "/save ./") == ["/save ./models/", "/save ./one.json", "/save ./sessions/"]
    assert completions(desk, f"/load {tmp_path}/o") == [f"/load {tmp_path}/one.json"]
    assert completions(desk, "/draft ./m") == ["/draft ./models/"]
    assert completions(desk, "/draft ./t") == ["/draft ./two.gguf"]
    assert (
        completions(desk, "/draft /no/such/folder/") == completions(desk, "/load ~nobody-of-that-name/") == []
    )
