"""A transformers model without weights: its modules, names and shapes.

Of a model that sees and hears, too, the parts that do so are not made: only its text is asked for.
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

from offspec.core.replaced import Replacement, replaced

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
    hook = register_module_parameter_registration_hook(partial(_on_meta, get_ident()))
    try:
        with _NothingDrawn(), torch.random.fork_rng(devices=()):  # some numbers are drawn all the same
            try:
                with _without(_beside_text(config), config, auto):
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
def _without(unmade: frozenset[type], config: Any, auto: Any) -> Iterator[None]:
    """While the block runs, models of some configurations are made as `Unmade` in this thread.

    Every `__init__` is replaced: `__new__` of the base class alone would do, but cannot be restored. Python
    then refuses all arguments of the class.

    Args:
        unmade: Classes of these configurations.
        config: Configuration of the whole model.
        auto: Class of transformers that finds its model.
    """
    from transformers import AutoModel, PreTrainedModel

    for finder, kind in ((auto, type(config)), *((AutoModel, kind) for kind in unmade)):
        with suppress(Exception):  # a part that needs a package which is not installed
            finder._model_mapping.get(kind, None)  # imports the module with its class
    before = _UNMADE.set(unmade)
    try:
        classes = _with_own_init(PreTrainedModel) if unmade else ()
        with replaced(Replacement(kind, "__init__", _init) for kind in classes):
            yield
    finally:
        _UNMADE.reset(before)


def _with_own_init(base: Any) -> Iterator[type]:
    """`base` and all classes derived from it that define an `__init__`; some of them several times."""
    if "__init__" in vars(base):
        yield base
    for derived in base.__subclasses__():
        yield from _with_own_init(derived)


def _init(own: Callable[..., None]) -> Callable[..., None]:
    @wraps(own)
    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        config = args[0] if args else kwargs.get("config")
        if type(config) in _UNMADE.get():
            model.__class__ = Unmade
            model.__init__(config)
        else:
            own(model, *args, **kwargs)

    return init


def _on_meta(thread: int, module: torch.nn.Module, name: str, parameter: Parameter) -> Any:
    if parameter.is_meta or get_ident() != thread:
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
