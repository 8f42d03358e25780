"""Running a model for a while with another attention, or other products of experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FIELDS = {"attention": "_attn_implementation_internal", "experts": "_experts_implementation_internal"}


@contextmanager
def implementation(model: Any, **names: str) -> Iterator[None]:
    """While the block runs, every part of a transformers model uses the functions of these names.

    Args:
        model: Its configurations are set directly: transformers' own way reads the source of each module.
        names: Of `attention` and `experts`, as registered with transformers.
    """
    configs = {id(found): found for module in model.modules() if (found := getattr(module, "config", None))}
    before = list[tuple[Any, str, Any]]()
    for config in configs.values():
        for kind, name in names.items():
            if hasattr(config, _FIELDS[kind]):
                before.append((config, _FIELDS[kind], getattr(config, _FIELDS[kind])))
                setattr(config, _FIELDS[kind], name)
    try:
        yield
    finally:
        for config, field, value in before:
            setattr(config, field, value)
