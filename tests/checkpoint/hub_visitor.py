"""Visits to a hub that stands in, reached through HF_ENDPOINT.

Each visit is a process of its own, as the hub's client reads its environment when it is imported.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.checkpoint.hub_standin import StandIn


@dataclass
class Said:
    folder: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    error: str = ""
    text: str = ""
    progress: list[list[Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


class Visitor:
    """Runs a script in processes of their own that share a cache; it prints a `Said` as JSON."""

    def __init__(self, hub: StandIn, home: Path, script: str) -> None:
        self.hub, self.home, self.script = hub, home, script

    def __call__(self, model: str, setup: str = "", **environment: str) -> Said:
        self.hub.log.clear()
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        hub = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        result = subprocess.run(
            [sys.executable, "-c", self.script, model, setup],
            env={**clean, **hub, **environment},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        said = Said(**json.loads(result.stdout))
        assert "\n" not in said.text
        return said
