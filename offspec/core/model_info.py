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
        file_format: "safetensors" or "gguf".
        vocabulary: Number of token ids.
        bos_token: Text of the token that begins a text; empty if there is none.
        eos_token: Text of the token that ends a text; empty if there is none.
        chat_template: Empty if it has none.
        tools: Whether calls of tools are recognized in its answers.
        thinking: Whether its answers mark reasoning.
        infill_ends: Tokens that end text between a prefix and a suffix. None: it has no marks for these.
    """

    architecture: str
    parameters: int = 0
    nbytes: int = 0
    weights: str = ""
    file_format: str = "safetensors"
    vocabulary: int = 0
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str = ""
    tools: bool = False
    thinking: bool = False
    infill_ends: tuple[int, ...] | None = None
