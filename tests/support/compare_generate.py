"""Compares our engine with transformers' own `generate` on a small model of any configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offspec import CheckpointError, SamplingParams, UnsupportedModelError
from tests.support.tiny_models import auto_class, reference, tiny_engine, write_config

TOKENS = 16
MOST_VALUES = 128 << 20  # of a model: some families are large whatever their configuration
NOT_SAID = ("refused: ", "no model: ", "no configuration", "no reference: ")


def compare(config: Any, prompt: Sequence[int], folder: Path) -> str:
    """Return "same" if both give the same tokens, else the reason for a refusal or the tokens that differ."""
    try:
        if (values := _values(config)) > MOST_VALUES:
            return f"no model: it would have {values} values"
        write_config(folder, config)
    except Exception as error:  # overrides checks of the family itself
        return f"no model: {type(error).__name__} {error}"
    try:
        with tiny_engine(folder, folder, budget=24, context=64) as engine:
            result = engine.generate(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    except (UnsupportedModelError, CheckpointError) as error:
        return f"refused: {error}"
    try:
        expected = reference(folder, prompt, TOKENS)
    except Exception as error:  # families whose text transformers cannot generate with its own cache
        return f"no reference: {type(error).__name__} {error}"
    if list(result.token_ids) != expected:
        return f"{list(result.token_ids)} instead of {expected}"
    return "same" if result.tokens_per_pass > 1 else f"{result.tokens_per_pass} tokens a pass"


def _values(config: Any) -> int:
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
