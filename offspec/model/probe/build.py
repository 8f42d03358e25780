"""From a configuration to a skeleton that is known to run over token trees, or to the reason why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.gguf.stub import quiet
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.meta_model import FOR_OTHERS, has_language_model
from offspec.core.errors import OffspecError, UnsupportedModelError
from offspec.model.probe import findings as kept
from offspec.model.probe.cache_rows import NOTHING_KEPT, measure_rows
from offspec.model.probe.compare import try_out
from offspec.model.probe.findings import Findings
from offspec.model.probe.small_config import small_config
from offspec.model.skeleton import Skeleton, of_config, skeleton_of


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
    key = kept.key_of(config)
    found = kept.load(key)
    if found is None:
        with quiet():  # of a configuration that is made small, which no user wrote
            found = _tried(config, skeleton)
        kept.save(key, found)
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
        return _refused(f"no small model of its architecture can be made to try it ({reason})")
    if not behaviour.chains:
        kinds = " and ".join(sorted(set(getattr(config.get_text_config(), "layer_types", None) or ())))
        return _refused(f"{behaviour.reason} (its layers: {kinds})" if kinds else behaviour.reason)
    try:
        rows = measure_rows(skeleton, behaviour.wraps)
    except OffspecError as error:
        return _refused(str(error))
    return Findings("", not behaviour.trees, rows, behaviour.merges, behaviour.apart, behaviour.wraps)


def _refused(reason: str) -> Findings:
    return Findings(reason, False, NOTHING_KEPT)
