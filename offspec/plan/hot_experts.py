"""Which experts a target uses most: left by each run for the next, which reads those ahead.

A file in the user's cache for each target; one that is damaged is as good as none.
"""

import json
from pathlib import Path

from offspec.core.cache_dir import cache_root
from offspec.model.loaded import LoadedModel
from offspec.plan.records import key_of, write_if_possible
from offspec_planners.json_fields import parse

_VERSION = 1


def recall_experts(target: LoadedModel, target_print: str) -> None:
    """Have a target that was loaded keep the experts that earlier runs used most.

    They are read while nothing else is, into slots that nobody needs.
    """
    store = target.store
    if store is None:
        return
    shares = _read(_file(target_print), len(store.layouts))
    if shares is not None:
        store.recall(shares)


def save_experts(target: LoadedModel, target_print: str) -> None:
    """Leave what was learnt for later runs; where nothing can be written, they learn it again."""
    store = target.store
    if store is None or not store.stats.asked:
        return
    shares = [round(float(share), 4) for share in store.usage.shares]
    text = json.dumps({"version": _VERSION, "shares": shares}, separators=(",", ":"))
    write_if_possible(_file(target_print), text)


def _file(target_print: str) -> Path:
    return cache_root() / "experts" / f"{key_of(target_print)}.json"


def _read(file: Path, count: int) -> list[float] | None:
    """Shares of rows that asked for each of `count` experts; None where no file says so."""
    try:
        found = parse(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    shares = found.get("shares") if isinstance(found, dict) and found.get("version") == _VERSION else None
    if not isinstance(shares, list) or len(shares) != count:
        return None
    if not all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
        return None
    return [float(share) for share in shares]
