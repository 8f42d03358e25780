"""The file of a session: its lock, when it is written, and its content after an error."""

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
    return tmp_path / "saved_session.json"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(["a b", "c d"])


@pytest.fixture
def saved_session(engine: ScriptedEngine, file: Path) -> Session:
    """A session with one question, saved in the file."""
    session = engine.chat()
    session.keep(file)
    list(session.send("One."))
    return session


def contents(file: Path) -> list[str]:
    return [message.content for message in Conversation.read(file).messages]


def test_two_sessions_cannot_share_a_file(saved_session: Session, file: Path, tmp_path: Path) -> None:
    archive, before = SessionArchive(tmp_path), file.read_bytes()
    assert archive.is_in_use(file)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert archive.is_in_use(link)
    other = ScriptedEngine(["x"]).chat()
    list(other.send("Mine."))
    for name in (file, link):
        with pytest.raises(
            SessionError, match=r"saved_session\.json is open in another terminal; close it there"
        ):
            other.resume(Conversation.read(name), name)
        with pytest.raises(SessionError, match="another terminal"):
            other.keep(name)
    assert [message.content for message in other.messages] == ["Mine.", "x"]
    assert file.read_bytes() == before
    saved_session.close()
    assert not archive.is_in_use(file) and not list(tmp_path.glob(".*"))
    other.resume(Conversation.read(file), file)
    assert archive.is_in_use(file)
    list(other.send("More."))
    assert contents(file) == ["One.", "a b", "More.", "x"]
    list(saved_session.send("Kept nowhere."))
    assert len(contents(file)) == 4


def test_leaving_a_file_releases_its_lock(saved_session: Session, file: Path, tmp_path: Path) -> None:
    for leave in (
        saved_session.clear,
        lambda: saved_session.keep(None),
        lambda: saved_session.resume(Conversation(model="demo")),
    ):
        saved_session.keep(file)
        assert SessionArchive(tmp_path).is_in_use(file)
        leave()
        assert not SessionArchive(tmp_path).is_in_use(file) and not list(tmp_path.glob(".*"))
    assert contents(file) == ["One.", "a b"]


def test_garbage_collected_session_releases_its_file(engine: ScriptedEngine, file: Path) -> None:
    session = engine.chat()
    session.keep(file)
    list(session.send("One."))
    assert SessionArchive(file.parent).is_in_use(file)
    del session
    assert not SessionArchive(file.parent).is_in_use(file)


def test_locks_of_other_processes(saved_session: Session, file: Path, tmp_path: Path) -> None:
    archive = SessionArchive(tmp_path)
    saved_session.close()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert archive.is_in_use(file)
        with pytest.raises(SessionError, match="another terminal"):
            saved_session.keep(file)
        process.kill()
    assert list(tmp_path.glob(".*")) and not archive.is_in_use(file)  # the lock of a dead process
    saved_session.keep(file)
    assert archive.is_in_use(file)


def test_reading_does_not_write(saved_session: Session, file: Path) -> None:
    saved_session.close()
    before, inode = file.read_bytes(), file.stat().st_ino
    other = ScriptedEngine(config=EngineConfig(model="other")).chat()
    other.resume(Conversation.read(file), file)
    other.close()
    assert file.read_bytes() == before and file.stat().st_ino == inode


def test_conversation_does_not_conflict_with_itself(
    saved_session: Session, file: Path, full: list[int]
) -> None:
    full.append(errno.ENOSPC)
    list(saved_session.send("Two."))  # it is not in the file
    full.clear()
    with pytest.raises(RequestError, match="already"):
        saved_session.resume(Conversation.read(file), file)
    assert len(saved_session.messages) == 4


def test_folder_without_lock_support(
    saved_session: Session, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_session.close()

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert not SessionArchive(file.parent).is_in_use(file)
    saved_session.resume(Conversation.read(file), file)
    list(saved_session.send("Two."))
    assert contents(file) == ["One.", "a b", "Two.", "c d"]


def test_new_file_is_private_and_created_by_the_first_question(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "sessions" / "saved_session.json"
    session = engine.chat(system="Be kind.")
    session.keep(file)
    session.params = SamplingParams(seed=1)
    session.system = "Be brief."
    assert not file.parent.exists()
    list(session.send("One."))
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_symlink_is_kept(engine: ScriptedEngine, tmp_path: Path) -> None:
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


def test_settings_are_written_immediately(saved_session: Session, file: Path) -> None:
    saved_session.params = SamplingParams(temperature=0.5)
    assert Conversation.read(file).params.temperature == 0.5
    saved_session.system = "Be kind."
    assert Conversation.read(file).system == "Be kind."


def test_refused_first_question_creates_no_file(engine: ScriptedEngine, file: Path) -> None:
    engine.closed = True
    session = engine.chat()
    session.conversation.updated = "2026-01-01T00:00:00Z"
    session.keep(file)
    with pytest.raises(ClosedError):
        list(session.send("One."))
    assert not file.exists() and session.conversation.updated == "2026-01-01T00:00:00Z"
    assert session.messages == () and session.conversation.title == ""


def test_unsaved_conversation_is_not_discarded(
    saved_session: Session, file: Path, full: list[int], tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    saved_session.save(other)
    full.append(errno.ENOSPC)
    list(saved_session.send("Two."))
    talk, another = saved_session.conversation, Conversation.read(other)
    for leave in (
        saved_session.clear,
        lambda: saved_session.resume(another, other),
        lambda: saved_session.keep(tmp_path / "new.json"),
    ):
        with pytest.raises(DiskFullError) as caught:
            leave()
        assert (
            saved_session.conversation is talk
            and len(saved_session.messages) == 4
            and SessionArchive(tmp_path).is_in_use(file)
        )
        assert not SessionArchive(tmp_path).is_in_use(other) and "saved_session.json" in str(caught.value)
    full.clear()
    saved_session.clear()
    assert contents(file) == ["One.", "a b", "Two.", "c d"] and saved_session.messages == ()


def test_close_releases_the_lock_if_writing_fails(
    saved_session: Session, file: Path, full: list[int], tmp_path: Path
) -> None:
    full.append(errno.ENOSPC)
    list(saved_session.send("Two."))
    with pytest.raises(DiskFullError):
        saved_session.close()
    assert not SessionArchive(tmp_path).is_in_use(file)
    saved_session.close()


def test_old_snapshot_does_not_overwrite_a_newer_one(
    saved_session: Session, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save during the answer is slow: the answer's own write follows it."""
    write, saving, go = Conversation.write, threading.Event(), threading.Event()
    saver = threading.Thread(target=lambda: saved_session.save(file), name="saver")

    def slow(talk: Conversation, target: Path) -> None:
        if threading.current_thread() is saver:
            saving.set()
            go.wait(PATIENCE)
        write(talk, target)

    monkeypatch.setattr(Conversation, "write", slow)
    for event in saved_session.send("Two."):
        if isinstance(event, TextDelta):
            saver.start()
            assert saving.wait(PATIENCE)
            threading.Timer(0.05, go.set).start()
    saver.join(PATIENCE)
    assert contents(file) == ["One.", "a b", "Two.", "c d"]


def test_elapsed_time_alone_causes_no_write(
    saved_session: Session, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a long pass the file is not written again and again."""
    monkeypatch.setattr(keeper, "INTERVAL_S", 0.01)
    said: list[int] = []
    write = Conversation.write

    def listen(talk: Conversation, target: Path) -> None:
        said.append(len(talk.messages[-1].content))
        write(talk, target)

    monkeypatch.setattr(Conversation, "write", listen)
    engine.answers = [LONG]
    for event in saved_session.send("Two."):
        if isinstance(event, TextDelta):
            time.sleep(0.1)
    # The question, three passes and the end; twice a change between a check and the write after it.
    assert len(said) <= 1 + 2 * 3 + 1


def test_copy_is_a_separate_conversation(saved_session: Session, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    saved_session.save(copy)
    first = Conversation.read(copy)
    mine = Conversation.read(file)
    assert first.id != mine.id and replace(first, id=mine.id) == mine
    saved_session.save(copy)
    assert Conversation.read(copy).id == first.id
    archive = SessionArchive(tmp_path)
    assert archive.find(first.id) == copy and archive.find(mine.id) == file
    again = Session.load(ScriptedEngine(), copy)
    again.save(copy)
    assert Conversation.read(copy).id == first.id
    long = replace(mine, id="x" * 64)
    saved_session.resume(long)
    saved_session.save(tmp_path / "long.json")
    assert len(Conversation.read(tmp_path / "long.json").id) == 64


def test_invalid_data_is_never_written(saved_session: Session, file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(RequestError, match="Unicode"):
        saved_session.params = SamplingParams(stop=("\ud800",))
    with pytest.raises(RequestError, match="Unicode"):
        saved_session.system = "\udfff"
    with pytest.raises(RequestError, match="Unicode"):
        ScriptedEngine().chat(system="\udfff")
    title, saved_session.conversation.title = saved_session.conversation.title, "caf\udce9"
    with pytest.raises(OffspecError, match="Unicode"):
        saved_session.save(file)
    assert [event for event in saved_session.send("Two.") if isinstance(event, Notice)]
    assert file.read_bytes() == before
    saved_session.conversation.title = title
    saved_session.save(file)
    assert len(contents(file)) == 4
