"""What the trial of a configuration found, kept in the user's cache for the next load of the same."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offspec.core.cache_dir import cache_root
from offspec.core.errors import OffspecError
from offspec.core.files import write_file
from offspec.model.probe.cache_rows import CacheRows
from offspec_planners.json_fields import parse, read

_VERSION = 7
# What a configuration says beside its architecture.
_BESIDE = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "quantization_config",
)


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one configuration.

    Args:
        refusal: Why it cannot be run over token trees; empty where it can.
        chains: Whether every token tree must be a single path.
        rows: What each position takes in the cache.
        merges: Whether rows of several sequences may go through a layer together.
        apart: Whether attention then takes one sequence after the other.
        wraps: Of how many values the tuples are that layers return; 0: they return no tuples.
    """

    refusal: str
    chains: bool
    rows: CacheRows
    merges: bool = False
    apart: bool = False
    wraps: int = 0


def key_of(config: Any) -> str:
    """The name of a configuration's findings: they hold for these versions of offspec and transformers."""
    import transformers

    from offspec import __version__

    said = {name: value for name, value in config.to_dict().items() if name not in _BESIDE}
    parts = [_VERSION, __version__, transformers.__version__, said]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load(key: str) -> Findings | None:
    """What an earlier run found; None where there is nothing that can be read."""
    try:
        return read(parse(_file(key).read_text("utf-8")), Findings)
    except (OSError, ValueError):
        return None


def save(key: str, findings: Findings) -> None:
    """Leave findings for later runs; where nothing can be written, they find the same again."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(asdict(findings), separators=(",", ":")).encode())
    except (OSError, OffspecError):
        return


def _file(key: str) -> Path:
    return cache_root() / "architectures" / f"{key}.json"
