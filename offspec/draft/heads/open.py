"""Opens a draft named by the user as a head of a known kind, recognized by the contents of its files."""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.hub_name import hub_name
from offspec.checkpoint.open import local_path
from offspec.core.config import MTP
from offspec.core.errors import DraftError
from offspec.core.events import Event
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.files import SAFE, HeadFiles, open_files, weight_files
from offspec.draft.heads.pickles import PICKLED
from offspec.draft.kinds import IN_FILES

_HEAD_KEYS = {key for kind in IN_FILES.values() for key in kind.keys}
_HEAD_NAME = re.compile("|".join([MTP, *(kind.word for kind in IN_FILES.values())]), re.IGNORECASE)


def open_head(model: str, target: TargetShape, notify: Callable[[Event], None]) -> OpenedHead | None:
    """Open the head in a folder, a file of weights or a hub repository; return None if it holds a model.

    None is also returned if nothing exists there: opening it as a model reports the error. Only the headers
    of a head are read. A hub id is downloaded, unless it is a model. Raises DraftError if a head does not fit
    the target, is of an unknown kind or requires running code; else the errors of `open_checkpoint`.
    """
    path, kind = local_path(model)
    if kind == "file" and not path.name.endswith((SAFE, *PICKLED)):
        return None
    if not kind:
        fetched = _fetched(model, notify)
        if fetched is None:
            return None
        path = fetched
    files = open_files(path, model)
    if files is None:
        return None
    for known in IN_FILES.values():
        if known.recognizes(files.config, files.names):
            return known.opened(files, target)
    if _is_model(files):
        return None
    raise DraftError(_unknown(files))


def _fetched(model: str, notify: Callable[[Event], None]) -> Path | None:
    found = hub_name(model)
    if found is None or found.gguf:
        return None
    from offspec.checkpoint.hub import download_head

    def choose(names: Collection[str], load: Callable[[str], dict[str, Any]]) -> list[str]:
        if CONFIG not in names or not may_be_head(load(CONFIG), names):
            return []
        return weight_files(names, load, model)

    return download_head(found.repository, found.revision, notify, choose)


def may_be_head(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether weights are worth downloading to see their names. EAGLE's first heads claim to be
    LMs.
    """
    said = " ".join([str(config.get("model_type")), *_architectures(config), *names])
    return (
        any(key in config for key in _HEAD_KEYS)
        or bool(_HEAD_NAME.search(said))
        or config.get("num_hidden_layers") == 1
    )


def _is_model(files: HeadFiles) -> bool:
    """Return whether opening it as a model succeeds, or at least gives the better error message."""
    from transformers import CONFIG_MAPPING

    if (files.folder / "adapter_config.json").is_file():
        return True
    causal = any(name.endswith("ForCausalLM") for name in _architectures(files.config))
    kind = files.config.get("model_type")
    return causal or (isinstance(kind, str) and kind in CONFIG_MAPPING)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the list of architectures; some configurations have a single string."""
    value = config.get("architectures")
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str)]


def _unknown(files: HeadFiles) -> str:
    if not files.names:
        return f"{files.place} cannot draft: it holds no tensors; download it again, or use another head"
    said = files.config.get("model_type") or files.config.get("speculators_model_type")
    says = f"{said[:40]!r} is not known" if isinstance(said, str) else f"its {CONFIG} names no model_type"
    *titles, last = IN_FILES
    some = ", ".join(repr(name[:60]) for name in list(files.names)[:2])
    return (
        f"{files.place} cannot draft: {says}, and tensors such as {some} belong to no known head: "
        f"known are {', '.join(titles)} and {last} heads, and models with the target's vocabulary"
    )
