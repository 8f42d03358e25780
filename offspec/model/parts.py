"""What of a loaded target its drafters may use: the embedding, the head, and how large things are."""

from typing import Any

import torch

from offspec.model.loaded import LoadedModel


class TargetParts:
    """The ends of a loaded target. The head must stay in memory where `project` is called.

    Letters: n rows, H hidden size, V vocabulary.
    """

    def __init__(self, target: LoadedModel) -> None:
        self._target = target

    @property
    def config(self) -> Any:
        """The text configuration, as transformers reads it."""
        return self._target.skeleton.config

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return self._target.skeleton.vocab_size

    @property
    def layers(self) -> int:
        return len(self._target.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self._target.dtype

    @property
    def device(self) -> torch.device:
        return self._target.device

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, H] of token ids [n], as the family has them; from disk where they are not held."""
        embedding: Any = self._target.skeleton.model.get_input_embeddings()
        rows: torch.Tensor = embedding(tokens[None])[0]
        return rows

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of hidden states [n, H] that are behind the final norm; caps and scaling included."""
        return self._target.tree_model.project(hidden)
