"""A headless Chromium, driven through its DevTools protocol over a pipe; needs no library.

with Browser(folder) as browser:
    page = browser.open("http://127.0.0.1:8000/")
    page.wait("document.title == 'tiny'")
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import PATIENCE

CHROMIUM = shutil.which("chromium")
_KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), " ": (" ", 32)}


class Browser:
    """A browser of its own. folder: an empty folder for its profile."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        their_in, self._out = _pipe()
        self._in, their_out = _pipe()
        given = [CHROMIUM, "--headless", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu"]
        given += ["--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"]
        given += ["--hide-scrollbars", "--disable-lcd-text", f"--user-data-dir={folder}", "about:blank"]
        self._pid = os.posix_spawn(
            CHROMIUM,
            given,
            {**os.environ, "HOME": str(folder)},
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, at, os.devnull, os.O_RDWR, 0) for at in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, their_in, 3),
                (os.POSIX_SPAWN_DUP2, their_out, 4),
            ],
            setpgroup=0,
        )
        os.close(their_in)
        os.close(their_out)
        self._rest, self._sent = b"", 0
        self.events: list[dict[str, Any]] = []  # events that the browser sent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools method."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._sent:
                assert "error" not in told, told["error"]
                result: dict[str, Any] = told["result"]
                return result
            self.events.append(told)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], PATIENCE)[0], "the browser does not respond"
            more = os.read(self._in, 2**20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def open(self, url: str, width: int = 1280, scheme: str = "light") -> "Page":
        """Open a page in a tab of its own, without stored data.

        Args:
            width: In CSS pixels.
            scheme: "light" or "dark".
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable", session)
        self.call("Storage.clearDataForOrigin", session, origin=url, storageTypes="local_storage")
        page = Page(self, session)
        page.set_viewport(width, 800, scheme)
        page.go(url)
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools method of this tab."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Go to another address in the same tab."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript and return the value."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        told = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until JavaScript evaluates to something true."""
        deadline = time.monotonic() + PATIENCE
        while not self.value(f"!!({expression})"):
            assert time.monotonic() < deadline, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.02)

    def write(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, named as in JavaScript."""
        text, code = _KEYS[key]
        given = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def set_viewport(self, width: int, height: int, scheme: str) -> None:
        """Set the size in CSS pixels, and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """Return a PNG of the visible part."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def errors(self) -> list[str]:
        """Errors of this tab so far: exceptions, and errors in the browser's log."""
        found = list[str]()
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(str(event["params"]["entry"]))
        return found


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, numbered above those that the browser reserves."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
