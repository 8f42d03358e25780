"""Parts of a loaded target for drafters: the embedding, the head, and sizes."""

from typing import Any

import torch

from offspec.model.loaded import LoadedModel


class TargetParts:
    """Embedding, head and sizes of a loaded target. `project` needs a resident head.

    Letters: n rows, H hidden size, V vocabulary.
    """

    def __init__(self, target: LoadedModel) -> None:
        self._target = target

    @property
    def config(self) -> Any:
        """Text configuration, as transformers reads it."""
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
        """Return the model's embeddings [n, H] of token ids [n], read from disk if they are not in memory."""
        embedding: Any = self._target.skeleton.model.get_input_embeddings()
        rows: torch.Tensor = embedding(tokens[None])[0]
        return rows

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] of hidden states [n, H] after the final norm, including caps and scaling."""
        return self._target.tree_model.project(hidden)
