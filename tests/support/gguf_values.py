"""Values that offspec reads from a GGUF file."""

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.tensors import TensorInfo, Weight
from offspec_kernels.dequant import dequantize
from tests.support.quantized_files import tensor_of


def values(weight: Weight) -> torch.Tensor:
    """Dequantize a weight to float32."""
    if isinstance(weight, TensorInfo):
        return tensor_of(weight).float()
    out = torch.full((int(np.prod(weight.shape)),), torch.nan)
    parts = {part: tensor_of(info) for part, info in weight.parts}
    return dequantize(weight.format, parts, weight.shape, out)


def load_float32(checkpoint: Checkpoint) -> PreTrainedModel:
    """Load the model in float32 from the weights that are streamed."""
    config = AutoConfig.from_pretrained(checkpoint.folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = {name: values(weight) for name, weight in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model
