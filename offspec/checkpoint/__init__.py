"""Checkpoints on disk, and the location of each tensor."""

from offspec.checkpoint.folder import Checkpoint
from offspec.checkpoint.open import local_path, open_checkpoint
from offspec.checkpoint.tensors import TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "local_path", "open_checkpoint"]
