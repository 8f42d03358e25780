"""Replacements of transformers' functions for recurrent layers, which run over token trees during a pass.

The code of a recurrent model calls one of a few functions of its own module with the state from its cache.
The functions have the same names in all models of a kind. During a pass, these names refer to replacements.
If the pass runs in the current thread, a replacement traverses its rows with offspec's state; otherwise it
calls the original.

Letters: T rows, C channels, K taps, G heads of keys, H of values, D numbers of a key, E of a value.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F

from offspec.core.monkeypatch import Replacement
from offspec.model.attention import current_context
from offspec.model.recurrence.state import Rows, StateUpdate
from offspec.model.recurrence.state_cache import SequenceScans
from offspec.model.row_independence import row_independent

_NO_STATE = torch.empty(0)  # placeholder for the state that model code passes to its cache


def tree_functions(model: torch.nn.Module) -> tuple[Replacement, ...]:
    """Return replacements for functions that the modules of `model` call, for use during a pass."""
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
        return (original if current_context() is None else over_tree)(*args, **kwargs)

    return call


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """Return the time steps dt [T, ...] of rows, with optional bias and softplus."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return row_independent(F.softplus, dt) if softplus else dt


def _causal_conv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve hidden_states [1, C, T] with weight [C, K]; return [1, C, T]."""
    from transformers.activations import ACT2FN

    scans = SequenceScans.of(hidden_states.shape[2])
    rows = scans.rows
    out = scans.convolve(hidden_states[0, :, :rows].T, weight, bias)
    if activation is not None:
        out = row_independent(ACT2FN[activation], out)
    return scans.with_copies(out.to(hidden_states.dtype)).T[None]


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule; return [1, T, H, E] and a placeholder for the state.

    Shapes: query and key [1, T, G, D], value [1, T, H, E], g [1, T, H] or [1, T, H, D], beta [1, T, H].
    """
    scans = SequenceScans.of(value.shape[1])
    rows = scans.rows

    def unit(vectors: torch.Tensor) -> torch.Tensor:
        wide = vectors.float()
        if use_qk_l2norm_in_kernel:
            wide = wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)
        return wide

    def update(kept: Rows) -> StateUpdate:
        return StateUpdate(unit(kept["key"]), kept["value"], kept["decay"], kept["beta"])

    given = {"key": key, "value": value, "decay": g, "beta": beta}
    queries = unit(query[0, :rows]) * query.shape[-1] ** -0.5
    out = scans.scan({name: rest[0, :rows] for name, rest in given.items()}, queries, update)
    return scans.with_copies(out.to(query.dtype))[None], _NO_STATE


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
    """Scan a Mamba-2 layer; return [1, T, H, E] float32.

    Shapes: hidden_states [1, T, H, E], dt [1, T, H], A [H], B and C [1, T, G, D].
    """
    scans = SequenceScans.of(hidden_states.shape[1])
    rows = scans.rows
    step = _step(dt[0, :rows], dt_bias, dt_softplus).clamp(*dt_limit).float()
    inputs = hidden_states[0, :rows]

    def update(kept: Rows) -> StateUpdate:
        return StateUpdate(kept["key"], kept["inputs"].float() * kept["step"][..., None], kept["decay"])

    kept = {"key": B[0, :rows], "inputs": inputs, "step": step, "decay": A.float() * step}
    out = scans.scan(kept, C[0, :rows], update)
    if D is not None:
        out = out + D[:, None] * inputs.float()
    out = scans.with_copies(out)[None]
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
    """Scan a Mamba layer; return [1, E, T] float32.

    Shapes: hidden_states, dt and z [1, E, T], A [E, D], B and C [1, D, T].
    """
    scans = SequenceScans.of(hidden_states.shape[2])
    rows = scans.rows
    step, inputs = _step(dt[0, :, :rows].T, delta_bias, delta_softplus), hidden_states[0, :, :rows].T
    rates = A.float().T.contiguous()[None]

    def update(kept: Rows) -> StateUpdate:
        value = kept["step"].float() * kept["inputs"].float()
        return StateUpdate(kept["key"], value[:, None], kept["step"][:, None], rates=rates)

    kept = {"key": B[0, :, :rows].T[:, None], "inputs": inputs, "step": step}
    out = scans.scan(kept, C[0, :, :rows].T[:, None], update)[:, 0]
    if D is not None:
        out = out + D * inputs.float()
    if z is not None:
        out = out * row_independent(F.silu, z[0, :, :rows].T.float())
    out = scans.with_copies(out).T[None]
    return (out, _NO_STATE) if return_last_state else out


_OVER_TREES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
