"""Facts about a loaded model, for clients that list models."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its files describe it.

    Args:
        architecture: The `model_type` of its config.json, such as "llama".
        parameters: Number of weights.
        nbytes: Bytes of the weights on disk.
        weights: Format of most weights on disk, such as "BF16" or "Q4_K".
        chat_template: Empty if it has none.
        tools: Whether calls of tools are recognized in its answers.
        thinking: Whether its answers mark reasoning.
        infill_ends: Tokens that end text between a prefix and a suffix. None: it has no marks for these.
    """

    architecture: str
    parameters: int = 0
    nbytes: int = 0
    weights: str = ""
    chat_template: str = ""
    tools: bool = False
    thinking: bool = False
    infill_ends: tuple[int, ...] | None = None
