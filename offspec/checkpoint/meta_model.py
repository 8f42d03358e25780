"""A transformers model without weights: its modules, names and shapes.

Of a multimodal model, only the modules that text passes through are built.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from threading import get_ident
from typing import Any

import torch
from torch.nn import Parameter, init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from offspec.core.monkeypatch import Replacement, monkeypatched

_LARGE = 1 << 28  # elements; larger than any buffer


FOR_OTHERS = "text passes through a module that was built for another modality"


class OmittedModule(torch.nn.Module):
    """Placeholder for a module that text does not pass through.

    Args:
        config: Configuration of the omitted module; None if unknown.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device("cpu")  # models place the inputs of this module here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: text must not reach an omitted module."""
        raise RuntimeError(FOR_OTHERS)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(FOR_OTHERS)


def meta_model(config: Any, **options: Any) -> Any:
    """Return the causal LM of a configuration, with parameters on meta and real buffers.

    Args:
        config: A transformers configuration of a language model or a multimodal model.
        options: Options of `from_config` of transformers' auto classes, whose errors are passed on.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    wrapped = not has_language_model(config) and type(config) in AutoModelForMultimodalLM._model_mapping
    auto: Any = AutoModelForMultimodalLM if wrapped else AutoModelForCausalLM
    hook = register_module_parameter_registration_hook(partial(_on_meta, get_ident()))
    try:
        with _SkipRandomInit(), torch.random.fork_rng(devices=()):  # some initializers still draw numbers
            try:
                with _without(_non_text_configs(config), config, auto):
                    return auto.from_config(config, **options)
            except (AttributeError, StopIteration):  # another module's __init__ reads an omitted one
                return auto.from_config(config, **options)
    finally:
        hook.remove()


def has_language_model(config: Any) -> bool:
    """Return whether transformers has a causal LM for such a configuration."""
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def _non_text_configs(config: Any) -> frozenset[type]:
    """Return the classes of nested configurations that the language model does not use."""
    text = config.get_text_config()
    beside, needed = set[type](), {type(text)}

    def look(part: Any) -> bool:
        """Return whether a configuration is the text configuration or contains it."""
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
def _without(unmade: frozenset[type], config: Any, auto: Any) -> Iterator[None]:
    """Build models of some configurations as `OmittedModule`, in this thread, while the block runs.

    Every `__init__` is replaced. Replacing `__new__` of the base class would suffice but cannot be undone:
    Python would then refuse all arguments of the class.

    Args:
        unmade: Classes of these configurations.
        config: Configuration of the whole model.
        auto: Auto class of transformers that finds the model class.
    """
    from transformers import AutoModel, PreTrainedModel

    for finder, kind in ((auto, type(config)), *((AutoModel, kind) for kind in unmade)):
        with suppress(Exception):  # the module may need a package that is not installed
            finder._model_mapping.get(kind, None)  # imports the module with its class
    before = _UNMADE.set(unmade)
    try:
        classes = _with_own_init(PreTrainedModel) if unmade else ()
        with monkeypatched(Replacement(kind, "__init__", _init) for kind in classes):
            yield
    finally:
        _UNMADE.reset(before)


def _with_own_init(base: Any) -> Iterator[type]:
    """Yield `base` and its subclasses that define an `__init__`; some are repeated."""
    if "__init__" in vars(base):
        yield base
    for derived in base.__subclasses__():
        yield from _with_own_init(derived)


def _init(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        config = args[0] if args else kwargs.get("config")
        if type(config) in _UNMADE.get():
            model.__class__ = OmittedModule
            model.__init__(config)
        else:
            own(model, *args, **kwargs)

    return init


def _on_meta(thread: int, module: torch.nn.Module, name: str, parameter: Parameter) -> Any:
    if parameter.is_meta or get_ident() != thread:
        return parameter
    return Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _SkipRandomInit(TorchFunctionMode):
    """Mode that skips random initialization of parameters on meta.

    torch has no meta kernel for it: its fallback imports the compiler, or takes longer than the rest of a
    linear layer. Matrices of all experts are created on meta, because even untouched memory for one of them
    may not be available.
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
