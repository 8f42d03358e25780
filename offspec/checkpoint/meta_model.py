"""A transformers model without weights: its modules, names and shapes.

Of a model that sees and hears, too, the parts that do so are not made: only its text is asked for.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import Parameter, init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

_LARGE = 1 << 28  # numbers, more than any buffer has


FOR_OTHERS = "text goes through a part of it that is made for something else"


class Unmade(torch.nn.Module):
    """In the place of a part that text does not go through.

    Args:
        config: What the part would have been made of; None where that is not known.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device("cpu")  # where tokens are put that should go through it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError: text was not supposed to come here."""
        raise RuntimeError(FOR_OTHERS)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(FOR_OTHERS)


def meta_model(config: Any, **options: Any) -> Any:
    """The causal LM of a configuration, its parameters on meta, its buffers real.

    Args:
        config: as transformers reads it, of a language model or of one with other inputs, too.
        options: for `from_config` of transformers' auto classes. Raises whatever that raises.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    wrapped = not has_language_model(config) and type(config) in AutoModelForMultimodalLM._model_mapping
    auto: Any = AutoModelForMultimodalLM if wrapped else AutoModelForCausalLM
    hook = register_module_parameter_registration_hook(_on_meta)
    try:
        with _NothingDrawn():
            try:
                with _without(_beside_text(config)):
                    return auto.from_config(config, **options)
            except (AttributeError, StopIteration):  # a part was looked at to make another
                return auto.from_config(config, **options)
    finally:
        hook.remove()


def has_language_model(config: Any) -> bool:
    """Whether transformers has a causal LM of such a configuration."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def _beside_text(config: Any) -> frozenset[type]:
    """Classes of the configurations in a configuration that are of no use to its language model."""
    text = config.get_text_config()
    beside, needed = set[type](), {type(text)}

    def look(part: Any) -> bool:
        """Whether a configuration is the text's, or has it inside."""
        found = part is text
        for name in part.sub_configs:
            inner = getattr(part, name, None)
            if hasattr(inner, "sub_configs"):
                found |= look(inner)
        (needed if found else beside).add(type(part))
        return found

    look(config)
    return frozenset(beside - needed - {type(config)})


_UNMADE: ContextVar[frozenset[type]] = ContextVar("_UNMADE", default=frozenset())


@contextmanager
def _without(configs: frozenset[type]) -> Iterator[None]:
    """While the block runs, models of such configurations are not made."""
    import transformers

    # Left in place: a class whose __new__ was taken away again refuses all arguments.
    base: Any = transformers.PreTrainedModel
    base.__new__ = _new
    before = _UNMADE.set(configs)
    try:
        yield
    finally:
        _UNMADE.reset(before)


def _new(cls: type, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    return Unmade(config) if type(config) in _UNMADE.get() else object.__new__(cls)


def _on_meta(module: torch.nn.Module, name: str, parameter: Parameter) -> Any:
    if parameter.is_meta:
        return parameter
    return Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _NothingDrawn(TorchFunctionMode):
    """Leaves parameters on meta alone that would be drawn at random.

    torch has no kernel for it: what it does instead imports its compiler, or takes longer than all else of a
    linear layer. Matrices of all experts are on meta from the beginning: there may be no room for one of
    them, even untouched.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None and _numbers(args) >= _LARGE:
            return function(*args, **{**kwargs, "device": "meta"})
        if function in (torch.Tensor.normal_, init.normal_, init.kaiming_uniform_, init.uniform_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*args, **kwargs)


def _numbers(sizes: Any) -> int:
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    return math.prod(size for size in given if isinstance(size, int))
