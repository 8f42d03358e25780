"""A transformers model without weights: its modules, names and shapes."""

from typing import Any

import torch
from torch.nn import Parameter, init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode


def meta_model(config: Any, **options: Any) -> Any:
    """The causal LM of a configuration, its parameters on meta, its buffers real.

    Args:
        config: as transformers reads it.
        options: for `AutoModelForCausalLM.from_config`. Raises whatever that raises.
    """
    from transformers import AutoModelForCausalLM

    hook = register_module_parameter_registration_hook(_on_meta)
    try:
        with _NothingDrawn():
            return AutoModelForCausalLM.from_config(config, **options)
    finally:
        hook.remove()


def _on_meta(module: torch.nn.Module, name: str, parameter: Parameter) -> Any:
    if parameter.is_meta:
        return parameter
    return Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _NothingDrawn(TorchFunctionMode):
    """Leaves parameters on meta alone that would be drawn at random.

    torch has no kernel for it, and what it does instead imports its compiler.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.Tensor.normal_, init.normal_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)
