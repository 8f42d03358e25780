"""Settings and results of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class StepContext:
    """Settings of a step, and its results so far.

    Args:
        dry: Whether sizes are tiny and the device is the CPU, or a simulated GPU.
        models: Folder for generated models: a tmpfs on a real machine.
        carried: Folder with the pieces of the demo model; see `bundle`.
        seconds: Time limit of the step.
        save: Writes `found` to the record, so that a stopped step keeps its results.
        found: Results so far.
    """

    dry: bool
    models: Path
    carried: Path
    seconds: float
    save: Callable[[], None] = lambda: None
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def settings(self) -> str:
        """Return everything except the results, for the process of a step."""
        folders = {"models": str(self.models), "carried": str(self.carried)}
        return json.dumps({"dry": self.dry, "seconds": self.seconds, **folders})

    @classmethod
    def of(cls, settings: str) -> StepContext:
        given = json.loads(settings)
        return cls(given["dry"], Path(given["models"]), Path(given["carried"]), given["seconds"])


def write_json(file: Path, content: Any) -> None:
    """Replace a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, default=str) + "\n", "utf-8")
    os.replace(partial, file)
