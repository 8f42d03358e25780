"""Host versions of offspec's Triton kernel launchers, with the same arguments and results."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offspec_kernels.dequant import dequantize as dequantize_on
from offspec_kernels.dequant.format import Format, Shape
from offspec_kernels.gumbel_argmax import ArgmaxResult, gumbel_argmax
from offspec_kernels.gumbel_argmax.arguments import ArgmaxArguments
from offspec_kernels.kv_compact import KVTable, kv_compact
from offspec_kernels.row_linear import grouped_linear as grouped_linear_on
from offspec_kernels.row_linear import row_linear as row_linear_on
from offspec_kernels.topk_children import TopChildren, topk_children
from offspec_kernels.tree_attention import eager as attention_eager
from offspec_kernels.tree_attention.arguments import AttentionArguments
from offspec_kernels.tree_conv import native as conv_native
from offspec_kernels.tree_scan import native as scan_native


def attend(given: AttentionArguments) -> None:
    attention_eager.attend(given)


def attend_exactly(given: AttentionArguments) -> None:
    attention_eager.attend(given._replace(exact=True))


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute in float64, so that a row does not depend on its neighbours."""
    return row_linear_on(rows, weight, bias, path="reference")


def grouped_linear(*args: Any) -> Tensor:
    return grouped_linear_on(*args, path="reference")


def tree_scan(*args: Any) -> None:
    scan_native.tree_scan(*args)


def tree_conv(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return conv_native.tree_conv(inputs, window, weight, bias)


def children(
    logits: Tensor,
    count: int,
    seed: int | None,
    positions: Sequence[int] | Tensor | None,
    tau: float,
    table: Tensor | None = None,
) -> TopChildren:
    return topk_children(logits, count, seed=seed, positions=positions, tau=tau, path="eager")


def pick(work: ArgmaxArguments) -> ArgmaxResult:
    return gumbel_argmax(  # without `noise`: the kernel makes its own, too
        work.logits,
        seed=work.seed,
        positions=work.positions,
        temperature=work.temperature,
        min_score=work.min_score,
        last_tie=work.last_tie,
        table=work.table,
        path="eager",
    )


def move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    kv_compact(table, start, rows, path="eager")


def dequantize(format: Format, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
    dequantize_on(format, parts, shape, out.view(-1), path="eager")
