"""Conversations on the page: copying, editing, regenerating, and the browser's storage."""

import json
import time

import pytest

from tests.support.browser import Browser, Page
from tests.support.chat_page import (
    IDLE,
    ask,
    click,
    element,
    in_browser,
    press,
    prompt,
    served,
    text,
    wait_for,
)
from tests.support.fake_engine import PassGate, ScriptedEngine

CODE = "Like this:\n\n```python\nprint(1)\n\nprint(2)\n```"
KEYS = "Object.keys(localStorage).filter(key => key.startsWith('offspec-conversation:'))"
TITLES = "[...document.querySelectorAll('#conversation-list span')].map(title => title.textContent)"
COPIED = """(() => {
  window.copied = [];
  if (%s) navigator.clipboard.writeText = async text => void copied.push(text);
  else Object.defineProperty(navigator, 'clipboard', {value: undefined});
  document.addEventListener('copy', () => copied.push(document.activeElement.value));
})()"""

FILL = """for (let size = 2 ** 22; size >= 1; size /= 2)
  try { for (;;) localStorage.setItem(`other-${Math.random()}`, 'x'.repeat(size)) } catch {}"""
BLOCK = """for (const name of ['localStorage', 'sessionStorage'])
  Object.defineProperty(window, name, {get() { throw new DOMException('blocked', 'SecurityError') }});"""


def store(page: Page, identity: str, stored: object) -> None:
    written = stored if isinstance(stored, str) else json.dumps(stored)
    page.value(f"localStorage.setItem('offspec-conversation:' + {identity!r}, {json.dumps(written)})")


def conversation(*texts: str, age: float = 0) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(texts)]
    return {"time": 1000 * (time.time() - age), "messages": messages}


@in_browser
@pytest.mark.parametrize("secure", [True, False])
def test_copy_answers_and_code(browser: Browser, secure: bool) -> None:
    """Also without a clipboard API, as over plain HTTP."""
    with served(ScriptedEngine([CODE])) as server:
        page = browser.open(server.url)
        ask(page, "Why?")
        page.wait(f"{IDLE} && {element('.answer code')}")
        assert text(page, ".code-head span") == "python"
        page.value(COPIED % json.dumps(secure))
        for action in ("copy", "copy-code"):
            press(page, f"[data-action={action}]")
            page.wait(f"{element(f'[data-action={action}]')}.textContent == 'Copied'")
            assert text(page, "#announcement") == "Copied"
            assert page.value("document.activeElement.dataset.action") == action
        assert page.value("copied") == [CODE, "print(1)\n\nprint(2)"]
        assert not page.errors()


@in_browser
def test_regenerate_last_answer(browser: Browser) -> None:
    engine = ScriptedEngine(["one", "two", "three", "three", "four"])
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "first")
        wait_for(page, "one")
        ask(page, "second")
        wait_for(page, "one", "two")
        shown = (
            "[...document.querySelectorAll('[data-action=regenerate]')].map(each => each.checkVisibility())"
        )
        assert page.value(shown) == [False, True]
        for note in (False, True):
            press(page, "article:last-child [data-action=regenerate]")
            wait_for(page, "one", "three")
            assert prompt(engine) == "<|user|>first\n<|assistant|>one\n<|user|>second\n<|assistant|>"
            assert ("same as before" in text(page, "article:last-child .note")) == note
        assert page.value("document.activeElement.id") == "messages"
        # A regeneration stopped before its first token keeps the previous answer.
        engine.gate.clear()
        press(page, "article:last-child [data-action=regenerate]")
        page.wait("document.getElementById('send').textContent == 'Stop'")
        assert engine.at_gate.wait(60)
        assert page.value(shown) == [False, False]
        page.press("Escape")
        wait_for(page, "one", "three")
        assert page.value("document.getElementById('question').value") == ""
        assert not page.errors()


@in_browser
def test_editing_a_message_replaces_what_followed(browser: Browser) -> None:
    engine = ScriptedEngine(["one", "two", "three"])
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "first")
        wait_for(page, "one")
        ask(page, "second")
        wait_for(page, "one", "two")
        press(page, "[data-action=edit]")
        assert page.value("document.activeElement.value") == "first"
        page.write(", but other")
        page.press("Escape")
        assert text(page, ".user p") == "first"
        press(page, "[data-action=edit]")
        page.write(" and")
        page.press("Enter", shift=True)
        page.write("last")
        page.press("Enter")
        wait_for(page, "three")
        assert page.value("document.querySelectorAll('article').length") == 2
        assert prompt(engine) == "<|user|>first and\nlast\n<|assistant|>"
        page.go(server.url)
        wait_for(page, "three")
        assert not page.errors()


@in_browser
def test_list_open_and_delete_conversations(browser: Browser) -> None:
    engine = ScriptedEngine(["one", "two", "three"])
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "first")
        wait_for(page, "one")
        press(page, "#new-button")
        assert page.value("document.activeElement.id") == "question"
        assert page.value("document.getElementById('start').checkVisibility()")
        ask(page, "second")
        wait_for(page, "two")
        press(page, "#conversations-button")
        assert page.value(TITLES) == ["second", "first"]
        assert page.value("document.querySelectorAll('[aria-current]').length") == 1
        press(page, "#conversation-list li:last-child [data-action=open]")
        wait_for(page, "one")
        page.go(server.url)
        wait_for(page, "one")
        ask(page, "third")
        wait_for(page, "one", "three")
        assert prompt(engine) == "<|user|>first\n<|assistant|>one\n<|user|>third\n<|assistant|>"
        press(page, "#conversations-button")
        assert page.value(TITLES) == ["first", "second"]
        for left in (["second"], []):
            press(page, "[data-action=delete]")
            assert text(page, "[data-action=delete]") == "Really delete?"
            page.press(" ")
            page.wait(f"JSON.stringify({TITLES}) == {json.dumps(left, separators=(',', ':'))!r}")
        assert page.value("document.getElementById('conversations-none').checkVisibility()")
        page.press("Escape")
        assert page.value("document.getElementById('start').checkVisibility()")
        assert page.value(KEYS) == []
        assert not page.errors()


@in_browser
def test_partial_answer_survives_a_reload(browser: Browser) -> None:
    engine = ScriptedEngine(["w0 w1 w2 w3 w4 w5 w6 w7 w8", "again"])
    engine.gate = PassGate(1)
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "first")
        page.wait(f"{element('.answer')}?.innerText == 'w0 w1 w2 w3'")
        page.go(server.url)
        wait_for(page, "w0 w1 w2 w3")
        server.wait_until_idle()
        engine.gate.clear()
        ask(page, "second")
        page.wait("document.getElementById('send').textContent == 'Stop'")
        page.go(server.url)
        wait_for(page, "w0 w1 w2 w3")
        assert page.value("document.getElementById('question').value") == "second"


@in_browser
def test_opening_a_conversation_stops_the_answer(browser: Browser) -> None:
    engine = ScriptedEngine(["w0 w1 w2 w3 w4 w5 w6 w7 w8"])
    engine.gate = PassGate(1)
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "first")
        page.wait(f"{element('.answer')}?.innerText == 'w0 w1 w2 w3'")
        click(page, "#new-button")
        page.wait(f"{IDLE} && {element('#start')}.checkVisibility()")
        click(page, "#conversations-button")
        click(page, "#conversation-list [data-action=open]")
        wait_for(page, "w0 w1 w2 w3")
        assert text(page, ".note") == "stopped"


@in_browser
def test_damaged_conversations_are_dropped(browser: Browser) -> None:
    with served(ScriptedEngine()) as server:
        page = browser.open(server.url)
        good = {"role": "user", "content": "good"}
        store(page, "good", {"time": 1, "messages": [{**good, "note": 5, "more": [{}]}], "more": 1})
        for at, damaged in enumerate(
            (
                "",
                "{",
                "null",
                "[]",
                {"time": 1},
                {"time": "x", "messages": [good]},
                {"time": 1, "messages": []},
                {"time": 1, "messages": [None]},
                {"time": 1, "messages": [{"role": "system", "content": "x"}]},
                {"time": 1, "messages": [good, good]},
                {"time": 1, "messages": [{"role": "user", "content": ["x"]}]},
            )
        ):
            store(page, f"damaged-{at}", damaged)
            page.value(f"sessionStorage.setItem('offspec-open', 'damaged-{at}')")
            page.go(server.url)
            page.wait(f"{IDLE} && {element('#start')}.checkVisibility()")
        click(page, "#conversations-button")
        assert page.value(TITLES) == ["good"]
        assert page.value(KEYS) == ["offspec-conversation:good"]
        assert not page.errors()


@in_browser
def test_storage_is_bounded(browser: Browser) -> None:
    with served(ScriptedEngine()) as server:
        page = browser.open(server.url)
        for age in range(3):
            store(page, f"large-{age}", conversation(f"{age}" * 1_500_000, age=60 + age))
        ask(page, "Why?")
        wait_for(page, "The sky is blue.")
        kept = page.value(KEYS)
        assert len(kept) == 3 and "offspec-conversation:large-2" not in kept
        for age in range(120):
            store(page, f"small-{age}", conversation("x", age=age))
        ask(page, "And?")
        wait_for(page, "The sky is blue.", "The sky is blue.")
        kept = page.value(KEYS)
        assert len(kept) == 100 and "offspec-conversation:small-90" in kept
        assert "offspec-conversation:small-110" not in kept
        assert not page.errors()


@in_browser
def test_page_works_with_full_or_blocked_storage(browser: Browser) -> None:
    with served(ScriptedEngine()) as server:
        page = browser.open(server.url)
        for trouble in (FILL, "Storage.prototype.setItem = () => { throw Error() }"):
            page.wait(IDLE)
            store(page, "old", conversation("old", "old", age=60))
            page.value(f"(() => {{ {trouble} }})()")
            ask(page, "Why?")
            wait_for(page, "The sky is blue.")
            assert "storage is full or blocked" in text(page, "#error")
            ask(page, "And?")
            wait_for(page, "The sky is blue.", "The sky is blue.")
            page.value("localStorage.clear()")
            page.go(server.url)
        page.call("Page.addScriptToEvaluateOnNewDocument", source=BLOCK)
        page.go(server.url)
        ask(page, "Why?")
        wait_for(page, "The sky is blue.")
        click(page, "#conversations-button")
        assert page.value(TITLES) == []
        assert not page.errors()
