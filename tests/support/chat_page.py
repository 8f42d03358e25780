"""The server's page in a browser: what a user does there, and what the page shows."""

from typing import Any

import pytest

from offspec.core.config import EngineConfig
from tests.support.browser import CHROMIUM, Page
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad
from tests.support.live_server import NAME, LiveServer

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
IDLE = "document.getElementById('send').textContent == 'Send' && !document.getElementById('send').disabled"
_ANSWERS = "[...document.querySelectorAll('.answer')].map(answer => answer.innerText)"


def served(engine: ScriptedEngine, **settings: Any) -> LiveServer:
    """A server whose engine follows a script."""
    load = ScriptedLoad(engine)
    return LiveServer(lambda notify: load(EngineConfig(NAME), None, notify), **settings)


def element(selector: str) -> str:
    """JavaScript for the first element that matches."""
    return f"document.querySelector({selector!r})"


def text(page: Page, selector: str) -> str:
    """Text of the first element that matches."""
    return str(page.value(f"{element(selector)}.textContent"))


def click(page: Page, selector: str, at: int = 0) -> None:
    """Click on an element that matches."""
    page.value(f"document.querySelectorAll({selector!r})[{at}].click()")


def press(page: Page, selector: str, key: str = " ") -> None:
    """Press a key on the first element that matches."""
    page.value(f"{element(selector)}.focus()")
    page.press(key)


def ask(page: Page, question: str) -> None:
    """Send a message with the keyboard."""
    page.wait(IDLE)
    page.value("document.getElementById('question').focus()")
    page.write(question)
    page.press("Enter")


def answers(page: Page) -> Any:
    """The answers that are shown."""
    return page.value(_ANSWERS)


def wait_for(page: Page, *texts: str) -> None:
    """Wait until these answers are shown and none is coming."""
    page.wait(f"{IDLE} && {_ANSWERS}.join('|') == {'|'.join(texts)!r}")


def prompt(engine: ScriptedEngine, request: int = -1) -> str:
    """The prompt of a request."""
    return engine.wording.decode_with_special(engine.requests[request].prompt)
