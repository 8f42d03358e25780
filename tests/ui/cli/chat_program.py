"""`offspec` with a scripted engine: `python -m tests.ui.cli.chat_program SCRIPT ARGS…` is `offspec ARGS…`.

SCRIPT is JSON: {"answers": ["…", …], "delay": 0, "fail_after": null, "failing_drafts": ["…"]}. fail_after is
of the first answer; a draft in failing_drafts cannot be loaded.
"""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from offspec.core.config import EngineConfig
from offspec.core.errors import DraftError
from offspec.core.events import Event
from tests.support.fake_engine import Script, ScriptedEngine, scripted_opener


def main() -> None:
    # A shell that starts us in the background has SIGINT ignored; a test must be able to send one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.argv.pop(1))
    first, *others = given.get("answers", ["The sky is blue."])
    script = Script(first, fail_after=given.get("fail_after"))
    opener = scripted_opener(ScriptedEngine([script, *others], delay=given.get("delay", 0.0)))

    def open_engine(
        config: EngineConfig, plan: Path | None, notify: Callable[[Event], None]
    ) -> ScriptedEngine:
        if config.draft in given.get("failing_drafts", ()):
            raise DraftError(f"{config.draft} has another vocabulary")
        return opener(config, plan, notify)

    from offspec.ui.cli import chat
    from offspec.ui.cli.main import main as program

    vars(chat)["open_engine"] = open_engine
    program()


if __name__ == "__main__":
    main()
