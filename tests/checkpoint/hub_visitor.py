"""Visits to a fake hub, reached through HF_ENDPOINT.

Each is a separate process, because the hub's client reads its environment on import.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.fake_hub import FakeHub

NOWHERE = "http://127.0.0.1:9"
_PROGRAM = """
import errno, json, shutil, sys
from pathlib import Path
from offspec.core.errors import OffspecError
from offspec.core.events import LoadProgress
{visit}
exec(sys.argv[1])
found = []
for name in sys.argv[2:]:
    events, said = [], {{}}
    try:
        visit(name, events, said)
    except OffspecError as error:
        said |= dict(error=type(error).__name__, text=str(error))
    progress = [event for event in events if isinstance(event, LoadProgress)]
    said["progress"] = [(event.stage, event.done, event.total, event.unit) for event in progress]
    said["notices"] = [event.text for event in events if not isinstance(event, LoadProgress)]
    found.append(said)
print(json.dumps(found))
"""


@dataclass
class VisitResult:
    folder: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    error: str = ""
    text: str = ""
    progress: list[list[Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


class Visitor:
    """Runs processes that share a cache. visit: code of a function that fills in a `VisitResult`."""

    def __init__(self, hub: FakeHub, home: Path, visit: str) -> None:
        self.hub, self.home, self.program = hub, home, _PROGRAM.format(visit=visit)

    def start(self, *models: str, setup: str = "", **environment: str) -> subprocess.Popen[str]:
        """Start a process that visits these models in turn, after the code in `setup`."""
        self.hub.log.clear()
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        hub = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", self.program, setup, *models],
            env={**clean, **hub, **environment},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def all(self, *models: str, setup: str = "", **environment: str) -> list[VisitResult]:
        """Return the results of one process that visits these models in turn, after the code in `setup`."""
        with self.start(*models, setup=setup, **environment) as process:
            stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        found = [VisitResult(**said) for said in json.loads(stdout)]
        assert all("\n" not in said.text for said in found)
        return found

    def __call__(self, model: str, setup: str = "", **environment: str) -> VisitResult:
        (said,) = self.all(model, setup=setup, **environment)
        return said
