"""Transformers' functions for layers with a state, over token trees while a pass of ours runs.

A family's code calls one of a few functions of its own module, the same in every family of a kind, with the
state that its cache holds. During a pass these names stand for functions that look whether the pass runs in
this thread, and if so walk its rows with our state; else they do what they did. The names are transformers'.

Letters: T rows, C channels, K taps, G heads of keys, H of values, D numbers of a key, E of a value.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F

from offspec.core.replaced import Replacement
from offspec.model.attention import running_context
from offspec.model.recurrence.state import Rows, Update
from offspec.model.recurrence.walks import Walks
from offspec.model.row_independence import evenly

_NO_STATE = torch.empty(0)  # in the place of a state that a family hands to its cache


def tree_functions(model: torch.nn.Module) -> tuple[Replacement, ...]:
    """Functions that the parts of `model` call, to be replaced during a pass."""
    modules = {type(part).__module__ for part in model.modules()}
    return tuple(
        Replacement(sys.modules[module], name, partial(_either, over_tree))
        for module in modules
        if module.startswith("transformers.")
        for name, over_tree in _OVER_TREES.items()
        if vars(sys.modules[module]).get(name) is not None
    )


def _either(over_tree: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if running_context() is None else over_tree)(*args, **kwargs)

    return call


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The steps dt [T, ...] of rows, with what a family adds to them."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return evenly(F.softplus, dt) if softplus else dt


def _causal_conv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """hidden_states [1, C, T], weight [C, K] to [1, C, T]."""
    from transformers.activations import ACT2FN

    walks = Walks.of(hidden_states.shape[2])
    rows = walks.rows
    out = walks.convolve(hidden_states[0, :, :rows].T, weight, bias)
    if activation is not None:
        out = evenly(ACT2FN[activation], out)
    return walks.with_copies(out.to(hidden_states.dtype)).T[None]


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key [1, T, G, D], value [1, T, H, E], g [1, T, H] or [1, T, H, D], beta [1, T, H]."""
    walks = Walks.of(value.shape[1])
    rows = walks.rows

    def unit(vectors: torch.Tensor) -> torch.Tensor:
        wide = vectors.float()
        if use_qk_l2norm_in_kernel:
            wide = wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)
        return wide

    def update(kept: Rows) -> Update:
        return Update(unit(kept["key"]), kept["value"], kept["decay"], kept["beta"])

    given = {"key": key, "value": value, "decay": g, "beta": beta}
    asked = unit(query[0, :rows]) * query.shape[-1] ** -0.5
    out = walks.scan({name: rest[0, :rows] for name, rest in given.items()}, asked, update)
    return walks.with_copies(out.to(query.dtype))[None], _NO_STATE


def _mamba2(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """hidden_states [1, T, H, E], dt [1, T, H], A [H], B and C [1, T, G, D] to [1, T, H, E] float32."""
    walks = Walks.of(hidden_states.shape[1])
    rows = walks.rows
    step = _step(dt[0, :rows], dt_bias, dt_softplus).clamp(*dt_limit).float()
    inputs = hidden_states[0, :rows]

    def update(kept: Rows) -> Update:
        return Update(kept["key"], kept["inputs"].float() * kept["step"][..., None], kept["decay"])

    kept = {"key": B[0, :rows], "inputs": inputs, "step": step, "decay": A.float() * step}
    out = walks.scan(kept, C[0, :rows], update)
    if D is not None:
        out = out + D[:, None] * inputs.float()
    out = walks.with_copies(out)[None]
    return (out, _NO_STATE) if return_final_states else out


def _mamba1(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """hidden_states, dt and z [1, E, T], A [E, D], B and C [1, D, T] to [1, E, T] float32."""
    walks = Walks.of(hidden_states.shape[2])
    rows = walks.rows
    step, inputs = _step(dt[0, :, :rows].T, delta_bias, delta_softplus), hidden_states[0, :, :rows].T
    rates = A.float().T.contiguous()[None]

    def update(kept: Rows) -> Update:
        value = kept["step"].float() * kept["inputs"].float()
        return Update(kept["key"], value[:, None], kept["step"][:, None], rates=rates)

    kept = {"key": B[0, :, :rows].T[:, None], "inputs": inputs, "step": step}
    out = walks.scan(kept, C[0, :, :rows].T[:, None], update)[:, 0]
    if D is not None:
        out = out + D * inputs.float()
    if z is not None:
        out = out * evenly(F.silu, z[0, :, :rows].T.float())
    out = walks.with_copies(out).T[None]
    return (out, _NO_STATE) if return_last_state else out


_OVER_TREES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
