"""From a configuration to a skeleton that is known to run over token trees, or to the reason why not.

A trial's findings are kept in the user's cache for the next load of the same configuration.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.gguf.stub import quiet
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.meta_model import FOR_OTHERS, has_language_model
from offspec.core.cache_dir import cache_root
from offspec.core.errors import OffspecError, UnsupportedModelError
from offspec.core.files import write_file
from offspec.model.probe.cache_rows import NOTHING_KEPT, CacheRows, measure_rows
from offspec.model.probe.compare import try_out
from offspec.model.probe.small_config import small_config
from offspec.model.skeleton import Skeleton, of_config, skeleton_of
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
    chains: bool = False
    rows: CacheRows = NOTHING_KEPT
    merges: bool = False
    apart: bool = False
    wraps: int = 0


def build_skeleton(folder: Path, dtype: torch.dtype) -> Skeleton:
    """The model that `folder`/config.json describes, its parameters on meta, its buffers real.

    At the first load of a configuration a small model of its architecture is run over token trees.

    Args:
        folder: With a config.json.
        dtype: Of the parameters.

    Raises:
        UnsupportedModelError: By the family's name, for what cannot be streamed or run over a token tree.
        CheckpointError: There can be no such model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # config.json is a stranger's file, checked by many hands
        raise UnsupportedModelError(_refusal(folder, error)) from error
    skeleton = skeleton_of(config, dtype)
    found = find(config, skeleton)
    if FOR_OTHERS in found.refusal and has_language_model(text := config.get_text_config()):
        skeleton = skeleton_of(text, dtype)
        found = find(text, skeleton)
    if found.refusal:
        raise UnsupportedModelError(f"{config.model_type} cannot be run over a token tree: {found.refusal}")
    return replace(
        skeleton,
        rows=found.rows,
        branches=not found.chains,
        merges=found.merges,
        apart=found.apart,
        wraps=found.wraps,
    )


def _refusal(folder: Path, error: Exception) -> str:
    """Why transformers cannot read a config.json, and what to do."""
    from transformers import CONFIG_MAPPING, __version__

    config = read_json(folder / CONFIG)
    family = config.get("model_type")
    if family is None:
        return "config.json has no model_type, which names the architecture: download it again"
    if not isinstance(family, str) or family in CONFIG_MAPPING:
        return f"config.json cannot be used: {of_config(error)}"
    shown = ascii(family[:40])
    own_code = "; code that comes with a model is never run" if config.get("auto_map") else ""
    return (
        f"the installed transformers {__version__} does not know the model type {shown}{own_code}: for a new "
        "family run `pip install --upgrade transformers`, else choose a model of a family that it knows"
    )


def find(config: Any, skeleton: Skeleton) -> Findings:
    """What is known of a configuration, else what a trial of it finds."""
    file = cache_root() / "architectures" / f"{_key_of(config)}.json"
    with suppress(OSError, ValueError):
        return read(parse(file.read_text("utf-8")), Findings)
    with quiet():  # of a configuration that is made small, which no user wrote
        found = _tried(config, skeleton)
    with suppress(OSError, OffspecError):  # else later runs find the same again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(asdict(found), separators=(",", ":")).encode())
    return found


def _tried(config: Any, skeleton: Skeleton) -> Findings:
    try:
        behaviour = try_out(small_config(config))
        if not behaviour.runs:
            behaviour = try_out(small_config(config, heads=4))
    except UnsupportedModelError:
        raise
    except Exception as error:  # a configuration's own checks, which know of no small model
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Findings(f"no small model of its architecture can be made to try it ({reason})")
    if not behaviour.chains:
        kinds = " and ".join(sorted(set(getattr(config.get_text_config(), "layer_types", None) or ())))
        return Findings(f"{behaviour.reason} (its layers: {kinds})" if kinds else behaviour.reason)
    try:
        rows = measure_rows(skeleton, behaviour.wraps)
    except OffspecError as error:
        return Findings(str(error))
    return Findings("", not behaviour.trees, rows, behaviour.merges, behaviour.apart, behaviour.wraps)


def _key_of(config: Any) -> str:
    """The name of a configuration's findings: they hold for these versions of offspec and transformers."""
    import transformers

    from offspec import __version__

    said = {name: value for name, value in config.to_dict().items() if name not in _BESIDE}
    parts = [_VERSION, __version__, transformers.__version__, said]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
