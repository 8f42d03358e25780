"""What offspec makes of a GGUF file's values."""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.tensors import TensorInfo, Weight
from offspec_kernels.dequant import dequantize
from tests.support.quantized_files import tensor_of


def values(weight: Weight) -> torch.Tensor:
    """What a weight is in float32."""
    if isinstance(weight, TensorInfo):
        return tensor_of(weight).float()
    out = torch.full((int(np.prod(weight.shape)),), torch.nan)
    parts = {part: tensor_of(info) for part, info in weight.parts}
    return dequantize(weight.format, parts, weight.shape, out)


def load_float32(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model in float32, of the weights that are streamed."""
    config = AutoConfig.from_pretrained(checkpoint.folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = {name: values(weight) for name, weight in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model
