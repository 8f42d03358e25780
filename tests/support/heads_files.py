"""Heads in their published layouts, with random weights for the tiny target."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from offspec.core.errors import OffspecError
from offspec.core.events import ignore_event
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.open import open_head
from tests.support.tiny_models import VOCABULARY

HIDDEN = 32
INNER = 24
Tensors = dict[str, torch.Tensor]

# Like FasterDecoding/medusa-vicuna-7b-v1.3, except that its file has five heads and not two.
MEDUSA_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}

# As in ibm-ai-platform/llama3-8b-accelerator.
MLP_CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "emb_dim": 4096,
    "inner_dim": 3072,
    "model_type": "mlp_speculator",
    "n_candidates": 5,
    "n_predict": 4,
    "scale_input": False,
    "tie_weights": False,
    "top_k_tokens_per_head": [4, 3, 2, 2],
    "torch_dtype": "float16",
    "transformers_version": "4.38.2",
    "vocab_size": 128256,
}


def target_shape(hidden: int = HIDDEN, vocabulary: int = VOCABULARY, name: str = "org/target") -> TargetShape:
    config = LlamaConfig(hidden_size=hidden, vocab_size=vocabulary, num_attention_heads=1)
    return TargetShape(name, hidden, vocabulary, 3, torch.float32, torch.device("cpu"), config)


def medusa_tensors(
    heads: int = 3,
    layers: int = 1,
    own: bool = True,
    bias: bool = True,
    hidden: int = HIDDEN,
    rows: int = VOCABULARY,
) -> Tensors:
    """Tensors named as in the first version; own: with output matrices, which the second version omits."""
    torch.manual_seed(heads + layers)
    tensors: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = 0.2 * torch.randn(hidden, hidden)
            if bias:
                tensors[f"{head}.{layer}.linear.bias"] = 0.2 * torch.randn(hidden)
        if own:
            tensors[f"{head}.{layers}.weight"] = torch.randn(rows, hidden)
    return tensors


def vllm_names(tensors: Tensors) -> Tensors:
    """Medusa heads named as by vLLM's converters."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        head, layer, rest = name.split(".", 2)
        linear = rest.startswith("linear.")
        place = f"blocks.{head}.layers.{layer}.{rest.removeprefix('linear.')}"
        renamed[place if linear else f"lm_heads.{head}.weight"] = tensor
    return renamed


def mlp_config(
    tied: bool = False, scale_input: bool = False, stages: int = 4, **changes: Any
) -> dict[str, Any]:
    sizes = {"emb_dim": HIDDEN, "inner_dim": INNER, "vocab_size": VOCABULARY, "n_predict": stages}
    return {**MLP_CONFIG, **sizes, "tie_weights": tied, "scale_input": scale_input, **changes}


def mlp_tensors(
    tied: bool = False,
    stages: int = 4,
    hidden: int = HIDDEN,
    inner: int = INNER,
    rows: int = VOCABULARY,
    prefix: str = "speculator.",
) -> Tensors:
    torch.manual_seed(stages + inner)
    tensors: Tensors = {}
    for stage in range(stages):
        if not tied or stage == 0:
            tensors[f"{prefix}emb.{stage}.weight"] = torch.randn(rows, inner)
            tensors[f"{prefix}head.{stage}.weight"] = torch.randn(rows, inner)
            tensors[f"{prefix}ln.{stage}.weight"] = 1 + 0.2 * torch.randn(inner)
            tensors[f"{prefix}ln.{stage}.bias"] = 0.2 * torch.randn(inner)
        if not tied or stage < 2:
            size = inner if stage else hidden
            tensors[f"{prefix}proj.{stage}.weight"] = torch.randn(inner, size) / size**0.5
    return tensors


def write_head(
    folder: Path, config: Mapping[str, Any] | None, tensors: Tensors, file: str = "model.safetensors"
) -> Path:
    """Write a folder with config.json, if given, and one file of weights, pickled if its name says so."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def write_hollow(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write a head of float16 tensors of any size that takes no disk space: a sparse file after a header."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + end)
    return folder


def open_for_tiny(path: Path) -> OpenedHead | None:
    return open_head(str(path), target_shape(), ignore_event)


def opening_fails(path: Path) -> OffspecError:
    """Return the error message, which must be one line that names the path."""
    with pytest.raises(OffspecError) as caught:
        open_for_tiny(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return caught.value
