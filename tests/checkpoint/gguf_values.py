"""What offspec makes of a GGUF file's values."""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.tensors import TensorInfo, Weight, torch_dtype
from offspec_kernels.dequant import dequantise


def stored(info: TensorInfo) -> torch.Tensor:
    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = bytearray(file.read(info.nbytes))
    return torch.frombuffer(data, dtype=torch_dtype(info.dtype)).view(info.shape)


def values(weight: Weight) -> torch.Tensor:
    """What a weight is in float32."""
    if isinstance(weight, TensorInfo):
        return stored(weight).float()
    out = torch.full((int(np.prod(weight.shape)),), torch.nan)
    parts = {part: stored(info) for part, info in weight.parts}
    return dequantise(weight.format, parts, weight.shape, out)


def ours(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model in float32, of the weights that are streamed."""
    config = AutoConfig.from_pretrained(checkpoint.folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = {name: values(weight) for name, weight in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model
