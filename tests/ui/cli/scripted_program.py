"""`offspec` with a scripted engine: `python -m tests.ui.cli.scripted_program SCRIPT ARGS…`.

SCRIPT is JSON: {"answers": ["…", …], "delay": 0, "fail_after": null, "pass_tokens": 4, "load_delay": 0,
"loud": false, "failing_drafts": ["…"], "failing_calls": [2, 3], "patience": 5}. fail_after and pass_tokens
apply to the first answer. A loud engine reports on stderr what it begins and closes. Drafts in
failing_drafts cannot be loaded. Loads in failing_calls, counted from 1, always fail. A server that is
stopped waits patience seconds.
"""

import json
import signal
import sys
from functools import partial

from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad
from tests.ui.cli.program import LOADING, TEXT


def main() -> None:
    # A shell that starts us in the background ignores SIGINT; a test must be able to send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.argv.pop(1))
    first, *others = given.get("answers", [TEXT])
    script = Script(first, fail_after=given.get("fail_after"), pass_tokens=given.get("pass_tokens", 4))
    engine = ScriptedEngine([script, *others], delay=given.get("delay", 0.0))
    engine.loud = given.get("loud", False)
    delay, failing = given.get("load_delay", 0.0), given.get("failing_drafts", ())
    calls = given.get("failing_calls", ())
    load = ScriptedLoad(engine, progress=LOADING, delay=delay, failing=failing, failing_calls=calls)
    sys.modules["offspec.engine.load"] = load.as_module()

    from offspec.ui.chat import setup
    from offspec.ui.cli import chat, checks
    from offspec.ui.cli.main import main as program

    if "patience" in given:
        from offspec.server import settings

        vars(settings)["Settings"] = partial(settings.Settings, shutdown_timeout=given["patience"])
    vars(chat)["open_engine"] = vars(setup)["open_engine"] = load
    vars(checks)["check_files"] = lambda config, plan=None: None  # the named files do not exist
    program()


if __name__ == "__main__":
    main()
