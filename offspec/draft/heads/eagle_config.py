"""The configuration of an EAGLE head's layer, of which no number is believed before it is looked at."""

import math
from typing import Any

from offspec.checkpoint.ranges import one_line
from offspec.core.errors import DraftError

# What is absent has LlamaConfig's default, in the authors' code as well.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
LARGEST = 2**31  # of any size there is
_OTHERS = ("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters")


def layer_config(title: str, given: Any) -> Any:
    """A LlamaConfig whose sizes are positive whole numbers that go together. Takes no memory for any size.

    title: of the head, for messages. Raises DraftError.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    try:
        config: Any = LlamaConfig(**{name: given[name] for name in (*_SIZES, *_OTHERS) if name in given})
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise _unlike(title, one_line(error)) from error
    for name in _SIZES:
        size = getattr(config, name)
        if type(size) is not int or not 0 < size < LARGEST:
            raise _unlike(title, f"{name} is {repr(size)[:60]}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise _unlike(
            title, f"{config.num_attention_heads} heads do not share {config.num_key_value_heads} evenly"
        )
    if config.head_dim % 2:
        raise _unlike(title, f"head_dim is {config.head_dim}, which is odd")
    epsilon = config.rms_norm_eps
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise _unlike(title, f"rms_norm_eps is {repr(epsilon)[:60]}")
    return config


def check_layer(title: str, config: Any) -> None:
    """Whether transformers can make positions and an activation of it.

    That takes memory for each number of a head: to be asked when tensors were found to be of these sizes.
    Raises DraftError.
    """
    from transformers.activations import ACT2FN
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        rates = LlamaRotaryEmbedding(config).inv_freq
        ACT2FN[config.hidden_act]
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise _unlike(title, one_line(error)) from error
    if not math.isfinite(float(rates.sum())):
        raise _unlike(title, "its positions are no finite numbers")


def _unlike(title: str, why: str) -> DraftError:
    return DraftError(f"{title} has a configuration of no Llama layer: {why}")
