"""The file of a session: whose it is, when it is written, and what is in it after a fault."""

import errno
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.chat import autosave as keeper
from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import ClosedError, DiskFullError, OffspecError, RequestError, SessionError
from offspec.core.events import Notice, TextDelta
from tests.chat.talks import LONG
from tests.support.fake_engine import ScriptedEngine
from tests.support.waiting import PATIENCE

HOLD = """
import sys
from pathlib import Path
from offspec.core.file_lock import Claim
claim = Claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kept.json"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(["a b", "c d"])


@pytest.fixture
def kept(engine: ScriptedEngine, file: Path) -> Session:
    """A session with one question, kept in the file."""
    session = engine.chat()
    session.keep(file)
    list(session.send("One."))
    return session


def contents(file: Path) -> list[str]:
    return [message.content for message in Conversation.read(file).messages]


def test_two_sessions_do_not_keep_one_file(kept: Session, file: Path, tmp_path: Path) -> None:
    archive, before = SessionArchive(tmp_path), file.read_bytes()
    assert archive.is_in_use(file)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert archive.is_in_use(link)
    other = ScriptedEngine(["x"]).chat()
    list(other.send("Mine."))
    for name in (file, link):
        with pytest.raises(SessionError, match=r"kept\.json is open in another terminal; close it there"):
            other.resume(Conversation.read(name), name)
        with pytest.raises(SessionError, match="another terminal"):
            other.keep(name)
    assert [message.content for message in other.messages] == ["Mine.", "x"]
    assert file.read_bytes() == before
    kept.close()
    assert not archive.is_in_use(file) and not list(tmp_path.glob(".*"))
    other.resume(Conversation.read(file), file)
    assert archive.is_in_use(file)
    list(other.send("More."))
    assert contents(file) == ["One.", "a b", "More.", "x"]
    list(kept.send("Kept nowhere."))
    assert len(contents(file)) == 4


def test_a_file_that_is_left_is_free(kept: Session, file: Path, tmp_path: Path) -> None:
    for leave in (kept.clear, lambda: kept.keep(None), lambda: kept.resume(Conversation(model="demo"))):
        kept.keep(file)
        assert SessionArchive(tmp_path).is_in_use(file)
        leave()
        assert not SessionArchive(tmp_path).is_in_use(file) and not list(tmp_path.glob(".*"))
    assert contents(file) == ["One.", "a b"]


def test_a_session_that_is_forgotten_frees_its_file(engine: ScriptedEngine, file: Path) -> None:
    session = engine.chat()
    session.keep(file)
    list(session.send("One."))
    assert SessionArchive(file.parent).is_in_use(file)
    del session
    assert not SessionArchive(file.parent).is_in_use(file)


def test_another_process_and_what_it_leaves_behind(kept: Session, file: Path, tmp_path: Path) -> None:
    archive = SessionArchive(tmp_path)
    kept.close()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert archive.is_in_use(file)
        with pytest.raises(SessionError, match="another terminal"):
            kept.keep(file)
        process.kill()
    assert list(tmp_path.glob(".*")) and not archive.is_in_use(file)  # the lock of a dead process
    kept.keep(file)
    assert archive.is_in_use(file)


def test_to_look_is_not_to_write(kept: Session, file: Path) -> None:
    kept.close()
    before, inode = file.read_bytes(), file.stat().st_ino
    other = ScriptedEngine(config=EngineConfig(model="other")).chat()
    other.resume(Conversation.read(file), file)
    other.close()
    assert file.read_bytes() == before and file.stat().st_ino == inode


def test_a_conversation_does_not_take_its_own_place(kept: Session, file: Path, full: list[int]) -> None:
    full.append(errno.ENOSPC)
    list(kept.send("Two."))  # which is not in the file
    full.clear()
    with pytest.raises(RequestError, match="already"):
        kept.resume(Conversation.read(file), file)
    assert len(kept.messages) == 4


def test_a_folder_where_no_lock_can_be_made(
    kept: Session, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.close()

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert not SessionArchive(file.parent).is_in_use(file)
    kept.resume(Conversation.read(file), file)
    list(kept.send("Two."))
    assert contents(file) == ["One.", "a b", "Two.", "c d"]


def test_a_new_file_is_private_and_made_with_the_first_question(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "sessions" / "kept.json"
    session = engine.chat(system="Be kind.")
    session.keep(file)
    session.params = SamplingParams(seed=1)
    session.system = "Be brief."
    assert not file.parent.exists()
    list(session.send("One."))
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_a_link_stays_a_link(engine: ScriptedEngine, tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "elsewhere" / "target.json"
    link.symlink_to(target)
    session = engine.chat()
    session.keep(link)
    list(session.send("One."))
    session.save(link)
    assert link.is_symlink() and contents(target) == ["One.", "a b"]
    session.close()
    session.save(link)  # a copy
    assert link.is_symlink() and Conversation.read(target).id != session.conversation.id


def test_what_is_set_between_questions_is_written_at_once(kept: Session, file: Path) -> None:
    kept.params = SamplingParams(temperature=0.5)
    assert Conversation.read(file).params.temperature == 0.5
    kept.system = "Be kind."
    assert Conversation.read(file).system == "Be kind."


def test_a_refused_first_question_leaves_no_file(engine: ScriptedEngine, file: Path) -> None:
    engine.closed = True
    session = engine.chat()
    session.conversation.updated = "2026-01-01T00:00:00Z"
    session.keep(file)
    with pytest.raises(ClosedError):
        list(session.send("One."))
    assert not file.exists() and session.conversation.updated == "2026-01-01T00:00:00Z"
    assert session.messages == () and session.conversation.title == ""


def test_what_is_on_no_disk_is_not_let_go(kept: Session, file: Path, full: list[int], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    kept.save(other)
    full.append(errno.ENOSPC)
    list(kept.send("Two."))
    talk, another = kept.conversation, Conversation.read(other)
    for leave in (kept.clear, lambda: kept.resume(another, other), lambda: kept.keep(tmp_path / "new.json")):
        with pytest.raises(DiskFullError) as caught:
            leave()
        assert (
            kept.conversation is talk and len(kept.messages) == 4 and SessionArchive(tmp_path).is_in_use(file)
        )
        assert not SessionArchive(tmp_path).is_in_use(other) and "kept.json" in str(caught.value)
    full.clear()
    kept.clear()
    assert contents(file) == ["One.", "a b", "Two.", "c d"] and kept.messages == ()


def test_closing_lets_go_even_where_it_cannot_write(
    kept: Session, file: Path, full: list[int], tmp_path: Path
) -> None:
    full.append(errno.ENOSPC)
    list(kept.send("Two."))
    with pytest.raises(DiskFullError):
        kept.close()
    assert not SessionArchive(tmp_path).is_in_use(file)
    kept.close()


def test_an_early_snapshot_does_not_lie_over_a_later_one(
    kept: Session, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody saves while the answer comes, and is slow: what the answer writes comes after it."""
    write, saving, go = Conversation.write, threading.Event(), threading.Event()
    saver = threading.Thread(target=lambda: kept.save(file), name="saver")

    def slow(talk: Conversation, target: Path) -> None:
        if threading.current_thread() is saver:
            saving.set()
            go.wait(PATIENCE)
        write(talk, target)

    monkeypatch.setattr(Conversation, "write", slow)
    for event in kept.send("Two."):
        if isinstance(event, TextDelta):
            saver.start()
            assert saving.wait(PATIENCE)
            threading.Timer(0.05, go.set).start()
    saver.join(PATIENCE)
    assert contents(file) == ["One.", "a b", "Two.", "c d"]


def test_time_that_passes_is_nothing_new(
    kept: Session, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pass takes long the file is not written again and again."""
    monkeypatch.setattr(keeper, "INTERVAL_S", 0.01)
    said: list[int] = []
    write = Conversation.write

    def listen(talk: Conversation, target: Path) -> None:
        said.append(len(talk.messages[-1].content))
        write(talk, target)

    monkeypatch.setattr(Conversation, "write", listen)
    engine.answers = [LONG]
    for event in kept.send("Two."):
        if isinstance(event, TextDelta):
            time.sleep(0.1)
    # The question, the three passes, the end; twice what comes between a look and the write that follows it.
    assert len(said) <= 1 + 2 * 3 + 1


def test_a_copy_is_a_conversation_of_its_own(kept: Session, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    kept.save(copy)
    first = Conversation.read(copy)
    mine = Conversation.read(file)
    assert first.id != mine.id and replace(first, id=mine.id) == mine
    kept.save(copy)
    assert Conversation.read(copy).id == first.id
    archive = SessionArchive(tmp_path)
    assert archive.find(first.id) == copy and archive.find(mine.id) == file
    again = Session.load(ScriptedEngine(), copy)
    again.save(copy)
    assert Conversation.read(copy).id == first.id
    long = replace(mine, id="x" * 64)
    kept.resume(long)
    kept.save(tmp_path / "long.json")
    assert len(Conversation.read(tmp_path / "long.json").id) == 64


def test_nothing_is_written_that_could_not_be_read(kept: Session, file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(RequestError, match="Unicode"):
        kept.params = SamplingParams(stop=("\ud800",))
    with pytest.raises(RequestError, match="Unicode"):
        kept.system = "\udfff"
    with pytest.raises(RequestError, match="Unicode"):
        ScriptedEngine().chat(system="\udfff")
    title, kept.conversation.title = kept.conversation.title, "caf\udce9"
    with pytest.raises(OffspecError, match="Unicode"):
        kept.save(file)
    assert [event for event in kept.send("Two.") if isinstance(event, Notice)]
    assert file.read_bytes() == before
    kept.conversation.title = title
    kept.save(file)
    assert len(contents(file)) == 4
