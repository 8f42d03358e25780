"""A small model of any configuration in our engine, beside transformers' own `generate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offspec import CheckpointError, SamplingParams, UnsupportedModelError
from tests.support.tiny_models import auto_class, reference, tiny_engine, write_config

TOKENS = 16
MOST_VALUES = 128 << 20  # of a model: some families are large whatever their configuration says
NOT_SAID = ("refused: ", "no model: ", "no configuration", "no reference: ")


def compare(config: Any, prompt: Sequence[int], folder: Path) -> str:
    """ "same" where a tree says what transformers says, else why it is refused, or what it said."""
    try:
        if (values := _values(config)) > MOST_VALUES:
            return f"no model: it would have {values} values"
        write_config(folder, config)
    except Exception as error:  # whatever a family's own checks say
        return f"no model: {type(error).__name__} {error}"
    try:
        with tiny_engine(folder, folder, budget=24, context=64) as engine:
            result = engine.generate(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    except (UnsupportedModelError, CheckpointError) as error:
        return f"refused: {error}"
    try:
        expected = reference(folder, prompt, TOKENS)
    except Exception as error:  # of a family that transformers cannot ask for text with its own cache
        return f"no reference: {type(error).__name__} {error}"
    if list(result.token_ids) != expected:
        return f"{list(result.token_ids)} instead of {expected}"
    return "same" if result.tokens_per_pass > 1 else f"{result.tokens_per_pass} tokens a pass"


def _values(config: Any) -> int:
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
