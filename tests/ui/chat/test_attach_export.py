"""`/attach` and `/export`: attachments, refusals, and a conversation as Markdown."""

from pathlib import Path

import pytest

from offspec.core.errors import OffspecError, RequestError
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from tests.support.fake_engine import ScriptedEngine
from tests.ui.chat.talk import ANSWER, finished, said, say, shown


def test_attachments_go_with_the_next_question_only(chat: ChatController, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"\xef\xbb\xbfbuy milk\r\nand bread\r\n")
    (tmp_path / "code.md").write_text("```python\nx\n```\n")
    assert shown(chat, "/attach").startswith("Nothing is attached")
    assert "`notes.txt`, 4 tokens" in shown(chat, f"/attach {tmp_path}/notes.txt")
    listed = shown(chat, f"/attach {tmp_path}/code.md")
    assert listed.startswith("Attached to the next question") and "`notes.txt`" in listed
    finished(chat.ask(chat.build_question("What is this?")))
    assert said(chat)[0] == (
        "What is this?\n\nnotes.txt:\n\n```\nbuy milk\nand bread\n```\n\n"
        "code.md:\n\n````\n```python\nx\n```\n````"
    )
    assert chat.session.conversation.title == "What is this?"
    assert chat.build_question("And now?") == "And now?"


def test_attachments_are_read_again_or_removed(chat: ChatController, tmp_path: Path) -> None:
    for folder, text in (("a", "old"), ("b", "b"), ("a", "new")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "notes.txt").write_text(text)
        listed = shown(chat, f"/attach {tmp_path}/{folder}/notes.txt")
    assert sorted(attachment.text for attachment in chat.attachments) == ["b", "new"]
    assert listed.count("`notes.txt`, 1 token") == 2 and "1 tokens" not in listed
    shown(chat, "/attach none")
    assert chat.build_question("And now?") == "And now?"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x89PNG\xff\0", r"is not UTF-8 text \(byte 0\): attach a text file, or save it as UTF-8"),
        (b"a\0b", "not text: it contains NUL bytes"),
        (b" \n", "is empty"),
        (b"word " * 100, r"has 100 tokens, 100 with other attachments, .* holds only 60 "),
        (b"word " * 2000, r"has 10 KB, too much for a context of 60 tokens"),
        (None, "the file .* does not exist"),
    ],
    ids=["binary", "zero", "blank", "long", "longer", "missing"],
)
def test_refused_attachments(
    chat: ChatController, engine: ScriptedEngine, tmp_path: Path, data: bytes | None, complaint: str
) -> None:
    engine.context = 60
    if data is not None:
        (tmp_path / "file").write_bytes(data)
    with pytest.raises(RequestError, match=complaint) as caught:
        run_command(chat, f"/attach {tmp_path}/file")
    assert "\n" not in str(caught.value) and not chat.attachments


def test_paths_that_are_not_files(chat: ChatController, tmp_path: Path) -> None:
    for path, complaint in (
        (tmp_path, "is a folder"),
        ("/dev/zero", "is not a regular file"),
        ("~no-such-user/x", "cannot be read"),
    ):
        with pytest.raises(RequestError, match=complaint):
            run_command(chat, f"/attach {path}")


def test_export_and_export_again(chat: ChatController, tmp_path: Path) -> None:
    file = tmp_path / "talk.md"
    with pytest.raises(RequestError, match="the conversation is empty"):
        run_command(chat, f"/export {file}")
    say(chat, "Why?")
    chat.session.system = "Be brief."
    assert str(file) in shown(chat, f"/export {file}")
    text = file.read_text()
    assert text.startswith(f"<!-- offspec conversation {chat.session.conversation.id} -->\n\n# Why?\n")
    assert f"## System message\n\nBe brief.\n\n## Question\n\nWhy?\n\n## Answer\n\n{ANSWER}\n" in text
    say(chat, "And then?")
    shown(chat, f"/export {file}")
    assert "And then?" in file.read_text()


def test_export_does_not_overwrite_other_files(chat: ChatController, tmp_path: Path) -> None:
    say(chat, "Why?")
    (tmp_path / "mine.md").write_text("mine")
    for path, complaint in (
        (f"{tmp_path}/mine.md", "is there already"),
        (f"{tmp_path}/talk.txt", "ends in .md"),
        (f"{tmp_path}/no/talk.md", "cannot be written"),
        ("", "no file given; name one"),
    ):
        with pytest.raises(OffspecError, match=complaint):
            run_command(chat, f"/export {path}".strip())
    assert (tmp_path / "mine.md").read_text() == "mine"
