"""List of everything in transformers, torch and jinja that offspec changes, and helpers for such changes.

`offspec.core.monkeypatch` replaces attributes of other packages only while a call of offspec needs it. `wrap`
replaces the forward of modules in offspec's own models. Functions for transformers to call are registered
under offspec's own names, which no other model uses.
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
    """Change to another package or to process state.

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
        "vision and audio parts are not built; other threads build models as usual",
    ),
    Patch(
        "transformers.utils.chat_template_utils._compile_jinja_template",
        ("model.template_limits",),
        "the template is rendered",
        "jinja's sandbox limits neither memory nor time; other threads compile templates as usual",
    ),
    Patch(
        "causal_conv1d_fn and other functions of recurrent layers, in transformers.models.*.modeling_*",
        ("model.recurrence.functions", "model.runner", "model.probe.cache_rows"),
        "the pass ends",
        "states follow the branches of a token tree; other threads call the functions of transformers",
    ),
    Patch(
        "torch.nn hook on the registration of parameters",
        ("checkpoint.meta_model",),
        "the model is made",
        "parameters are created on the meta device; those of other threads are not affected",
    ),
    Patch(
        "torch function modes RowIndependentFunctions and RowProducts",
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
        "no random numbers are drawn for parameters on the meta device; a mode holds for one thread",
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
        ("engine.batched_pass", "model.probe.compare"),
        "the draft for the next pass is made, the trial ends",
        "two threads share the processors; a trial computes next to nothing",
    ),
    Patch(
        "settings of torch's allocator on a GPU",
        ("model.devices",),
        "the process ends",
        "expandable segments reduce fragmentation; PYTORCH_ALLOC_CONF takes precedence",
    ),
    Patch(
        "environment: GOMP_SPINCOUNT, OMP_WAIT_POLICY, ONEDNN_PRIMITIVE_CACHE_CAPACITY, if not set",
        ("core.openmp", "core.memory"),
        "the process ends",
        "torch's threads spin for milliseconds, and oneDNN keeps 500 MB of code",
    ),
)


def wrap(module: torch.nn.Module, run: Callable[..., Any], *given: Any) -> Callable[[], None]:
    """Replace the forward of one of offspec's own modules; return a function that undoes it.

    Args:
        module: Module of a model built by offspec.
        run: Called as run(forward, *given, ...) with the module's previous forward and the caller's
            arguments.
        given: Arguments bound in advance.
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
    """Return a copy of a module that shares its parts and has the forward of its class."""
    twin = copy(module)
    vars(twin).pop("forward", None)
    return twin


_FIELDS = {"attention": "_attn_implementation_internal", "experts": "_experts_implementation_internal"}


@contextmanager
def implementation(model: Any, **names: str) -> Iterator[None]:
    """Use the functions of these names in every part of a transformers model while the block runs.

    Args:
        model: Model whose configurations are set directly, because transformers' own setter reads the source
            of each module.
        names: Registered names for `attention` and `experts`.
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
