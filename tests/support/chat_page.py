"""Drives the server's page in a browser: a user's actions, and what the page shows."""

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
    """Return a server with a scripted engine."""
    load = ScriptedLoad(engine)
    return LiveServer(lambda notify: load(EngineConfig(NAME), None, notify), **settings)


def element(selector: str) -> str:
    """Return JavaScript for the first matching element."""
    return f"document.querySelector({selector!r})"


def text(page: Page, selector: str) -> str:
    """Return the text of the first matching element."""
    return str(page.value(f"{element(selector)}.textContent"))


def click(page: Page, selector: str, at: int = 0) -> None:
    """Click on a matching element."""
    page.value(f"document.querySelectorAll({selector!r})[{at}].click()")


def press(page: Page, selector: str, key: str = " ") -> None:
    """Press a key on the first matching element."""
    page.value(f"{element(selector)}.focus()")
    page.press(key)


def ask(page: Page, question: str) -> None:
    """Send a message with the keyboard."""
    page.wait(IDLE)
    page.value("document.getElementById('question').focus()")
    page.write(question)
    page.press("Enter")


def answers(page: Page) -> Any:
    """Return the answers shown."""
    return page.value(_ANSWERS)


def wait_for(page: Page, *texts: str) -> None:
    """Wait until the page shows these answers and is idle."""
    page.wait(f"{IDLE} && {_ANSWERS}.join('|') == {'|'.join(texts)!r}")


def prompt(engine: ScriptedEngine, request: int = -1) -> str:
    """Return the prompt of a request."""
    return engine.wording.decode_with_special(engine.requests[request].prompt)
