"""Facts about a loaded model, for clients that list models."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a model, taken from its files.

    Args:
        architecture: The `model_type` of its config.json, such as "llama".
        parameters: Number of weights.
        nbytes: Bytes of the weights on disk.
        weights: Format of most weights on disk, such as "BF16" or "Q4_K".
        file_format: "safetensors" or "gguf".
        vocabulary: Number of token ids.
        bos_token: Text of the token that begins a text; empty if there is none.
        eos_token: Text of the token that ends a text; empty if there is none.
        chat_template: Source of the chat template; empty if there is none.
        tools: Whether tool calls are recognized in answers.
        thinking: Whether answers mark reasoning.
        infill_ends: Tokens that end text between a prefix and a suffix; None if the model has no infill
            marks.
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
