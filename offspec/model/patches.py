"""List of everything in transformers, torch and jinja that offspec changes, and the ways to change it.

An attribute of another package is replaced by `offspec.core.replaced`, only while a call of offspec needs it.
Modules of offspec's own models get another forward by `wrap`. Functions that transformers is to call are
registered under names of offspec's own, which no other model uses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Patch:
    """One change outside of offspec.

    Args:
        target: Class, function, registry or setting that is changed.
        by: Modules of offspec that change it.
        until: End of the change.
        why: Reason for it.
    """

    target: str
    by: tuple[str, ...]
    until: str
    why: str


PATCHES = (
    Patch(
        "transformers.PreTrainedModel.__init__, and that of derived classes",
        ("checkpoint.meta_model",),
        "the model is made",
        "parts for pictures and sound are not made; other threads make theirs as ever",
    ),
    Patch(
        "transformers.utils.chat_template_utils._compile_jinja_template",
        ("model.template_limits",),
        "the template is rendered",
        "jinja's sandbox limits neither memory nor time; other threads compile templates as ever",
    ),
    Patch(
        "causal_conv1d_fn and other functions of layers with a state, in transformers.models.*.modeling_*",
        ("model.recurrence.functions", "model.runner", "model.probe.cache_rows"),
        "the pass ends",
        "states follow the branches of a token tree; other threads call the functions of transformers",
    ),
    Patch(
        "torch.nn hook on the registration of parameters",
        ("checkpoint.meta_model",),
        "the model is made",
        "parameters go to the meta device as they are made; those of other threads stay where they are",
    ),
    Patch(
        "torch function modes EvenFunctions and RowProducts",
        ("model.row_independence",),
        "the pass ends",
        "bits of a row must not depend on its place, nor on the number of rows; a mode holds for one thread",
    ),
    Patch(
        "torch function mode _WithoutWeights",
        ("model.probe.cache_rows",),
        "the model is measured",
        "layers run without weights; a mode holds for one thread",
    ),
    Patch(
        "torch function mode _NothingDrawn",
        ("checkpoint.meta_model",),
        "the model is made",
        "no numbers are drawn for parameters on the meta device; a mode holds for one thread",
    ),
    Patch(
        "transformers.AttentionInterface and ALL_EXPERTS_FUNCTIONS, entries whose names begin with offspec_",
        ("model.skeleton", "model.probe.cache_rows", "distill.batched_forward"),
        "the process ends",
        "only models whose configuration names an entry call it",
    ),
    Patch(
        "sys.meta_path, while transformers imports its first model",
        ("core.lazy_imports",),
        "the import ends; names of unused packages in transformers are looked up at their first use",
        "torch's compiler, accelerate and scipy take 180 MB that offspec does not use",
    ),
    Patch(
        "sys.settrace of the thread",
        ("model.template_limits",),
        "the template is rendered",
        "a template must end",
    ),
    Patch(
        "verbosity of transformers' log",
        ("checkpoint.gguf.stub",),
        "the file is read",
        "transformers warns of defaults that offspec overwrites",
    ),
    Patch(
        "filters of Python's warnings",
        ("model.skeleton",),
        "the model is made",
        "transformers warns of configurations that offspec does not use",
    ),
    Patch(
        "number of torch's threads",
        ("engine.batch", "model.probe.compare"),
        "the draft is made ahead, the trial ends",
        "two threads share the processors; a trial computes next to nothing",
    ),
    Patch(
        "settings of torch's allocator on a GPU",
        ("model.device",),
        "the process ends",
        "expandable segments leave fewer gaps; PYTORCH_ALLOC_CONF wins",
    ),
    Patch(
        "environment: GOMP_SPINCOUNT, OMP_WAIT_POLICY, ONEDNN_PRIMITIVE_CACHE_CAPACITY, if not set",
        ("core.openmp", "core.memory"),
        "the process ends",
        "torch's threads spin for milliseconds, and oneDNN keeps 500 MB of code",
    ),
)


def wrap(module: torch.nn.Module, run: Callable[..., Any], *given: Any) -> Callable[[], None]:
    """Replace the forward of one module of offspec's own, and return a function that undoes it.

    Args:
        module: Module of a model that offspec has made.
        run: Called as run(forward, *given, ...) with the forward that the module had, and the arguments of
            its caller.
        given: Arguments that are known beforehand.
    """
    before = vars(module).get("forward")
    module.forward = partial(run, module.forward, *given)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def unwrapped(module: Any) -> Any:
    """Copy of a module that shares its parts, with the forward of its class."""
    twin = copy(module)
    vars(twin).pop("forward", None)
    return twin


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
