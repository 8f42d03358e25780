"""In which order the rows and columns of a weight lie in a GGUF file, where it is not the model's.

Letters: K heads of keys, R heads of values for each of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from offspec.checkpoint.gguf.header import GgufTensor


class Run(NamedTuple):
    """Rows of one source that follow each other in the weight too."""

    source: int
    start: int
    rows: int


class Stack(NamedTuple):
    """A weight of one matrix for each expert. alternate: its rows are one of each source in turn; turned: it
    has rows and columns exchanged.
    """

    alternate: bool = False
    turned: bool = False


class Order(NamedTuple):
    """A weight's rows, run by run, where they are not those of its one source.

    tiles (A, B, size): columns that lie as A times B pieces of a size, and are wanted as B times A. Of a
    vector, all values are columns. stack: how each expert's matrix is made of those of the sources.
    """

    runs: tuple[Run, ...] = ()
    tiles: tuple[int, int, int] | None = None
    stack: Stack | None = None


AS_IT_IS = Order()


def order_of(config: Any, name: str, sources: list[GgufTensor], *, tiled: bool, turned: bool) -> Order:
    """The order of the weight `name` of the state dict in its sources. tiled, turned: see `Family`."""
    if name.endswith(".linear_attn.in_proj_qkvz.weight") and len(sources) == 2:
        return Order(_by_key_head(config))
    if turned and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return Order(stack=Stack(alternate=len(sources) > 1, turned=True))
    if len(sources) > 1 and all(len(source.shape) == 3 for source in sources):
        return Order(stack=Stack())
    if len(sources) > 1:
        return Order(tuple(Run(i, 0, source.shape[0]) for i, source in enumerate(sources)))
    if tiled and ".linear_attn." in name:
        return _tiled(config, name.rpartition(".linear_attn.")[2])
    return AS_IT_IS


def _by_key_head(config: Any) -> tuple[Run, ...]:
    """Queries, keys, values and gate of one head of keys after the other, of a gate (0) and the rest (1)."""
    heads, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    runs = []
    for head in range(heads):
        runs += [Run(1, head * size, size), Run(1, (heads + head) * size, size)]
        runs += [Run(1, 2 * heads * size + head * values, values), Run(0, head * values, values)]
    return tuple(runs)


def _tiled(config: Any, part: str) -> Order:
    """Heads of values lie as R times all K, and are wanted as K times R."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // keys
    if each == 1:
        return AS_IT_IS
    if part in ("A_log", "dt_bias"):
        return Order(tiles=(each, keys, 1))
    if part == "out_proj.weight":
        return Order(tiles=(each, keys, size))
    before = 0
    if part in ("in_proj_a.weight", "in_proj_b.weight"):
        size = 1
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config.linear_key_head_dim
    elif part != "in_proj_z.weight":
        return AS_IT_IS
    heads = [Run(0, before + (i * keys + key) * size, size) for key in range(keys) for i in range(each)]
    return Order((Run(0, 0, before), *heads) if before else tuple(heads))
