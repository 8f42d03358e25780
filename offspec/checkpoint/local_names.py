"""Names of the models on this machine, found by their folders alone, for completion while one types."""

from collections.abc import Iterator
from pathlib import Path

from offspec.checkpoint.open import DEMO, DEMO_WIDE, embedded_model
from offspec.core.errors import CheckpointError

_PREFIX = "models--"


def local_names() -> Iterator[tuple[str, str]]:
    """Each name that MODEL may have without a download, and where it comes from. Raises nothing."""
    try:
        embedded_model()
        yield DEMO, "the small model that is installed"
        yield DEMO_WIDE, "the same widened to 1.9B"
    except CheckpointError:
        pass
    from huggingface_hub import constants

    try:
        folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"{_PREFIX}*/snapshots"))
    except OSError:
        return
    for folder in folders:
        yield folder.parent.name.removeprefix(_PREFIX).replace("--", "/"), "in the cache of the hub"
