"""Start screen of a chat: the model being loaded, and hints."""

from offspec.core.config import NONE, EngineConfig
from offspec_planners.units import format_bytes

HINTS = (
    ("Ask a question", "it is sent as soon as the model is loaded"),
    ("/attach notes.txt", "sends a text file with the next question"),
    ("/help", "lists the commands and keys"),
)


def startup_summary(config: EngineConfig) -> str:
    """Describe model, draft and given memory limits: `demo, draft auto, at most 1.30 GB of memory`."""
    parts = [config.model, "no draft" if config.draft == NONE else f"draft {config.draft}"]
    if config.memory is not None:
        parts.append(f"at most {format_bytes(config.memory)} of memory")
    if config.vram is not None:
        parts.append(f"at most {format_bytes(config.vram)} of GPU memory")
    return ", ".join(parts)
