"""Operations on rows of logits, and moves of cache rows, compared with torch's own operations.

Notation: N rows of logits, V vocabulary, K children; of a cache T layers, KV heads, C capacity, D head size;
R rows of an accepted path.
"""

from __future__ import annotations

from collections.abc import Callable

import numba  # noqa: F401 - packed weights import it, and then noise is generated in a compiled loop
import torch
from torch import Tensor

from bench.kernels.cases import OURS, Case, Op, Setting, Spec, levels, mismatch_share, scattered
from bench.kernels.timing import Call
from offspec.sampling.noise import GumbelNoise
from offspec_kernels.backend import Backend
from offspec_kernels.gumbel_argmax import gumbel_argmax
from offspec_kernels.kv_compact import KVTable, kv_compact
from offspec_kernels.noise import gumbel_row, torch_row
from offspec_kernels.topk_children import TopChildren, topk_children

TORCH = "torch"
_SEED, _POSITION = 7, 1000  # seed of the noise; first position of the tree
_TEMPERATURE, _TAU = 0.8, 1.2
_SPREAD = 3.0  # standard deviation of logits, similar to a model's
_UNLIKE = 0.01  # share of different choices: values that are equal except for rounding may swap
_CLOSE = 1e-3  # log-probabilities
_TREE = 256  # rows over which an accepted path is scattered


def build_argmax(spec: Spec, setting: Setting) -> Case:
    """Build a case of tree nodes on up to 32 levels. The kernel generates its noise; the others reuse it."""
    rows, size = spec.sizes
    logits = (_SPREAD * setting.random(rows, size)).to(spec.kind)
    positions = levels(rows, _POSITION)
    kept = GumbelNoise(_SEED, size, setting.device)

    def pick(path: Backend | None) -> Tensor:
        picks = gumbel_argmax(
            logits, seed=_SEED, positions=positions, temperature=_TEMPERATURE, noise=kept.row, path=path
        )
        return picks.token

    ways: dict[str, Call] = {OURS: lambda: pick(setting.path)}
    if setting.rivals:
        noise = torch.stack([kept.row(position) for position in positions])
        ways[TORCH] = lambda: logits.float().div_(_TEMPERATURE).add_(noise).argmax(dim=1)
    return Case(
        flops=0.0,
        nbytes=logits.nbytes,
        ways=ways,
        reference=lambda: pick("reference"),
        error=mismatch_share,
        limit=_UNLIKE,
    )


def build_children(spec: Spec, setting: Setting) -> Case:
    """Build a case of sibling nodes in one draft step; torch's implementation gets precomputed noise."""
    rows, size, count = spec.sizes
    logits = (_SPREAD * setting.random(rows, size)).to(spec.kind)
    kept = GumbelNoise(_SEED, size, setting.device)
    # On the device, so that nothing waits for the host; on a CPU as in the engine.
    listed = [_POSITION] * rows
    positions = torch.tensor(listed, device=setting.device) if setting.device.type == "cuda" else listed

    def find(path: Backend | None) -> TopChildren:
        return topk_children(
            logits, count, seed=_SEED, positions=positions, tau=_TAU, noise=kept.row, path=path
        )

    def plainly() -> TopChildren:
        x = logits.float() + kept.row(_POSITION)
        log_probs = torch.log_softmax(x / _TAU, dim=1)
        top, token = x.topk(count, dim=1)
        return TopChildren(token, top - top[:, :1], log_probs.gather(1, token))

    return Case(
        flops=0.0,
        nbytes=logits.nbytes,
        ways={OURS: lambda: find(setting.path), **({TORCH: plainly} if setting.rivals else {})},
        reference=lambda: find("reference"),
        error=_unlike_children,
        limit=_UNLIKE,
    )


def _unlike_children(found: TopChildren, wanted: TopChildren) -> float:
    """Return the share of different tokens or of inaccurate log-probabilities, whichever is larger."""
    off = (found.log_prob.double() - wanted.log_prob.double()).abs()
    return max(mismatch_share(found.token, wanted.token), float((~(off < _CLOSE)).double().mean()))


def build_noise(spec: Spec, setting: Setting) -> Case:
    """Build a case of the noise of some positions, which a CPU generates in a compiled loop."""
    positions, size = spec.sizes

    def made(row: Callable[[int, int, int, torch.device], Tensor]) -> list[Tensor]:
        return [row(_SEED, _POSITION + i, size, setting.device) for i in range(positions)]

    return Case(
        flops=0.0,
        nbytes=4 * positions * size,
        ways={
            OURS: lambda: made(gumbel_row),
            **({TORCH: lambda: made(torch_row)} if setting.rivals else {}),
        },
        reference=lambda: made(torch_row),
        error=mismatch_share,
        limit=0.0,
        look=lambda call: torch.stack(call()),
    )


def build_compact(spec: Spec, setting: Setting) -> Case:
    """Build a case of a path through a tree of up to 256 rows at the end of each layer's KV cache."""
    layers, heads, capacity, size, count = spec.sizes
    caches = [
        torch.zeros(1, heads, capacity, size, dtype=spec.kind, device=setting.device)
        for _ in range(2 * layers)
    ]
    start = capacity - min(_TREE, capacity)
    rows = scattered(count, start, capacity)
    table = KVTable(caches)
    chosen = torch.tensor(rows, device=setting.device)
    ends = torch.arange(start, start + count, device=setting.device)

    def copied() -> None:
        for cache in caches:
            cache.index_copy_(2, ends, cache.index_select(2, chosen))

    def assigned() -> None:
        for cache in caches:
            cache[:, :, start : start + count] = cache[:, :, chosen]

    def look(call: Call) -> Tensor:
        """Return all rows from the one before the tree on, after a move from a known initial state."""
        fresh = setting.random(*caches[0].shape).to(spec.kind)
        for index, cache in enumerate(caches):
            cache.copy_(fresh).add_(index)
        call()
        return torch.cat([cache[:, :, max(start - 1, 0) :] for cache in caches])

    ways: dict[str, Call] = {OURS: lambda: kv_compact(table, start, rows, path=setting.path)}
    if setting.rivals:
        ways |= {f"{TORCH}_index_copy": copied, f"{TORCH}_assignment": assigned}
    return Case(
        flops=0.0,
        nbytes=2 * 2 * layers * heads * count * size * spec.kind.itemsize,
        ways=ways,
        reference=lambda: kv_compact(table, start, rows, path="reference"),
        error=mismatch_share,
        limit=0.0,
        look=look,
    )


OPS = {
    "gumbel_noise": Op(("N", "V"), {"N": 2, "V": 20001}, build_noise, lambda: gumbel_row),
    "kv_compact": Op(
        ("T", "KV", "C", "D", "R"), {"T": 3, "C": 300, "R": 7}, build_compact, lambda: kv_compact
    ),
    "gumbel_argmax": Op(("N", "V"), {"N": 9, "V": 3001}, build_argmax, lambda: gumbel_argmax),
    "topk_children": Op(("N", "V", "K"), {"N": 5, "V": 3001, "K": 16}, build_children, lambda: topk_children),
}
