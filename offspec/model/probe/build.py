"""Building of a skeleton that is known to run over token trees, or else the reason why it cannot.

Results of a trial are cached in the user's cache folder for later loads of the same configuration.
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
from offspec.core.files import write_atomic
from offspec.model.probe.cache_rows import NOTHING_KEPT, CacheRows, measure_rows
from offspec.model.probe.compare import run_trial
from offspec.model.probe.small_config import small_config
from offspec.model.skeleton import Skeleton, config_error_reason, skeleton_of
from offspec_planners.json_fields import parse, read

_VERSION = 7
# Configuration entries that do not affect the architecture.
_IRRELEVANT = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "quantization_config",
)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of probing a configuration.

    Args:
        refusal: Reason why it cannot run over token trees; empty if it can.
        chains: Whether every token tree must be a single path.
        rows: Cache size per position.
        merges: Whether rows of several sequences may go through a layer together.
        apart: Whether attention then runs one sequence at a time.
        wraps: Length of the tuples that layers return; 0 if they return no tuples.
    """

    refusal: str
    chains: bool = False
    rows: CacheRows = NOTHING_KEPT
    merges: bool = False
    apart: bool = False
    wraps: int = 0


def build_skeleton(folder: Path, dtype: torch.dtype) -> Skeleton:
    """Build the model described by `folder`/config.json, with parameters on meta and real buffers.

    The first load of a configuration runs a small model of its architecture over token trees.

    Args:
        folder: Folder with a config.json.
        dtype: Dtype of the parameters.

    Raises:
        UnsupportedModelError: The model cannot be streamed or run over a token tree; names the model type.
        CheckpointError: The configuration is invalid.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # config.json is untrusted, and checked in many places of transformers
        raise UnsupportedModelError(_refusal(folder, error)) from error
    skeleton = skeleton_of(config, dtype)
    found = probe_architecture(config, skeleton)
    if FOR_OTHERS in found.refusal and has_language_model(text := config.get_text_config()):
        skeleton = skeleton_of(text, dtype)
        found = probe_architecture(text, skeleton)
    if found.refusal:
        raise UnsupportedModelError(f"{config.model_type} cannot be run over a token tree: {found.refusal}")
    return replace(
        skeleton,
        rows=found.rows,
        branches=not found.chains,
        supports_batching=found.merges,
        attention_per_sequence=found.apart,
        output_tuple_size=found.wraps,
    )


def _refusal(folder: Path, error: Exception) -> str:
    """Return why transformers cannot read a config.json, and what to do."""
    from transformers import CONFIG_MAPPING, __version__

    config = read_json(folder / CONFIG)
    family = config.get("model_type")
    if family is None:
        return "config.json has no model_type, which names the architecture: download it again"
    if not isinstance(family, str) or family in CONFIG_MAPPING:
        return f"config.json cannot be used: {config_error_reason(error)}"
    shown = ascii(family[:40])
    own_code = "; code shipped with a model is never run" if config.get("auto_map") else ""
    return (
        f"the installed transformers {__version__} does not support the model type {shown}{own_code}: for a "
        "new model type run `pip install --upgrade transformers`, otherwise choose a supported model"
    )


def probe_architecture(config: Any, skeleton: Skeleton) -> ProbeResult:
    """Return the cached result for a configuration, or run a trial and cache its result."""
    file = cache_root() / "architectures" / f"{_key_of(config)}.json"
    with suppress(OSError, ValueError):
        return read(parse(file.read_text("utf-8")), ProbeResult)
    with quiet():  # warnings about the small configuration do not concern the user
        found = _run_trials(config, skeleton)
    with suppress(OSError, OffspecError):  # without a cached result, later runs repeat the trial
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(asdict(found), separators=(",", ":")).encode())
    return found


def _run_trials(config: Any, skeleton: Skeleton) -> ProbeResult:
    try:
        trial = run_trial(small_config(config))
        if not trial.runs:
            trial = run_trial(small_config(config, heads=4))
    except UnsupportedModelError:
        raise
    except Exception as error:  # the configuration's own checks may reject a small model
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return ProbeResult(f"no small test model of its architecture can be built ({reason})")
    if not trial.chains:
        kinds = " and ".join(sorted(set(getattr(config.get_text_config(), "layer_types", None) or ())))
        return ProbeResult(f"{trial.reason} (its layers: {kinds})" if kinds else trial.reason)
    try:
        rows = measure_rows(skeleton, trial.output_tuple_size)
    except OffspecError as error:
        return ProbeResult(str(error))
    return ProbeResult(
        "",
        not trial.trees,
        rows,
        trial.merges,
        trial.attention_per_sequence,
        trial.output_tuple_size,
    )


def _key_of(config: Any) -> str:
    """Return the cache key of a configuration's result, including offspec's and transformers' versions."""
    import transformers

    from offspec import __version__

    relevant = {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}
    parts = [_VERSION, __version__, transformers.__version__, relevant]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
