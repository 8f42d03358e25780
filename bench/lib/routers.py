"""Random routers whose experts are chosen as often as is wished, measured on a model's own hidden states.

A random row of a router reads a random direction of the hidden states. Their mean is long, so with such rows
alone the same few experts would always be chosen. A row is therefore taken about the mean, and an offset is
added, along a direction in which every hidden state measures about one, since the routers in question have no
bias. The offsets are moved until each expert's share of the choices is what a Zipf law says.

Letters: T hidden states, E experts, k chosen, H hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_ROUNDS = 300
_STEP = 0.3
_RIDGE = 1e-3  # of the mean square, so that the direction is not fitted to these hidden states alone


def mlp_inputs(folder: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What the MLPs of a dense model are given: [T, H] float32 by layer. Each text's first token is left out,
    since its hidden state is like no other."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    taken: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for layer, kept in zip(model.model.layers, taken, strict=True):
        layer.mlp.register_forward_pre_hook(lambda module, args, kept=kept: kept.append(args[0][0, 1:]))
    with torch.inference_mode():
        for ids in texts:
            model.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return [torch.cat(kept) for kept in taken]


def make_router(hidden: torch.Tensor, experts: int, chosen: int, skew: float, seed: int) -> torch.Tensor:
    """A router [E, H] whose experts' shares of the choices that `hidden` [T, H] leads to are `wanted_shares`,
    in random order."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(experts, hidden.shape[1], generator=generator)
    one = _unit_direction(hidden)
    rows -= (rows @ hidden.mean(0))[:, None] * one
    rows /= (hidden @ rows.T).std(0)[:, None].clamp_min(1e-6)
    order = torch.randperm(experts, generator=generator)
    wanted = wanted_shares(experts, chosen, skew)[order]
    logits, measured = hidden @ rows.T, (hidden @ one)[:, None]
    offsets = torch.zeros(experts)
    for turn in range(_ROUNDS):
        shares = chosen_shares(logits + measured * offsets, chosen)
        change = (wanted / shares.clamp_min(0.2 / len(hidden))).log().clamp(-2, 2)
        offsets += _STEP * (1 - turn / _ROUNDS) * change
    return rows + offsets[:, None] * one


def _unit_direction(hidden: torch.Tensor) -> torch.Tensor:
    """[H], the product of which with each hidden state is about one: least squares."""
    square = hidden.T @ hidden / len(hidden)
    square += _RIDGE * square.diagonal().mean() * torch.eye(len(square))
    direction: torch.Tensor = torch.linalg.solve(square, hidden.mean(0))
    return direction


def wanted_shares(experts: int, chosen: int, skew: float) -> torch.Tensor:
    """[E], how many of the rows choose each expert, most first, like rank^-skew but at most 1;
    the sum is k."""
    shares = torch.arange(1, experts + 1, dtype=torch.float32) ** -skew
    full = torch.zeros(experts, dtype=torch.bool)
    for _ in range(experts):
        left = chosen - float(full.sum())
        wanted = torch.where(full, 1.0, shares * left / shares[~full].sum().clamp_min(1e-9))
        full |= wanted >= 1
    return wanted


def chosen_shares(logits: torch.Tensor, chosen: int) -> torch.Tensor:
    """[E], the share of rows of logits [T, E] that choose each expert."""
    return torch.bincount(logits.topk(chosen, 1).indices.flatten(), minlength=logits.shape[1]) / len(logits)
