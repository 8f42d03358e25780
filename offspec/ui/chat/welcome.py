"""What a chat shows before anything was said: what is being loaded, and what to try."""

from offspec.core.config import NONE, EngineConfig
from offspec_planners.units import format_bytes

HINTS = (
    ("Ask something", "it is sent as soon as the model is there"),
    ("/attach notes.txt", "sends a text file with the next question"),
    ("/help", "lists the commands and keys"),
)


def opening(config: EngineConfig) -> str:
    """Model, draft and the memory limits that were given: `demo, draft auto, at most 1.30 GB of memory`."""
    parts = [config.model, "no draft" if config.draft == NONE else f"draft {config.draft}"]
    if config.memory is not None:
        parts.append(f"at most {format_bytes(config.memory)} of memory")
    if config.vram is not None:
        parts.append(f"at most {format_bytes(config.vram)} of the GPU's")
    return ", ".join(parts)
