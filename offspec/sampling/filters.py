"""Which of a row's tokens top_k, top_p and min_p leave, one after the other: where they cut it.

Letters: V vocabulary, W rows.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.core.config import SamplingParams
from offspec_kernels.gumbel_argmax import keep_above

Border = tuple[Tensor, Tensor | None]  # the `least` and `last_tie` of `keep_above`, one of each a row

# How many of the likeliest tokens top_p looks at before it sorts the whole vocabulary, which takes
# milliseconds on a CPU.
_PREFIXES = (256, 4096)

_TOGETHER = 4  # rows that a device sorts at once, always as many: 40 bytes a token and row
_UNITS = 2.0**52  # of a likelihood: whole numbers have one sum, in whatever order a GPU's scan adds them
_ALL = torch.iinfo(torch.int64).max  # the last of equals that stay, where all do


def borders(scores: Tensor, params: SamplingParams) -> Border:
    """Where W rows [W, V] float32 are cut: least [W] float32 and, unless all equals stay, last_tie [W] int64.

    Several rows are sorted at once, and nobody waits for a device. A CPU is quicker with one after the other.
    """
    if scores.device.type == "cpu" and len(scores) == 1:
        return border(scores[0], params)
    parts = [_sorted_borders(part, params) for part in scores.split(_TOGETHER)]
    return torch.cat([least for least, _ in parts]), torch.cat([tie for _, tie in parts])


def border(scores: Tensor, params: SamplingParams) -> Border:
    """The same of a row [V]: least [1], and last_tie [1] or None."""
    found: Border = scores.new_full((1,), -math.inf), None
    kept = scores
    if 0 < params.top_k < len(scores):
        found = torch.topk(scores, params.top_k).values[-1:], None  # all equals are kept
        kept = keep_above(scores.clone(), *found)
    if params.top_p < 1.0:
        found = _top_p(kept, params.top_p) or found
    if params.min_p > 0.0:
        # p < min_p * p_max, without a softmax.
        found = _raised(found, scores.amax(dim=0, keepdim=True) + math.log(params.min_p))
    return found


def _raised(found: Border, floor: Tensor) -> Border:
    """The higher of the two. A floor keeps all that equal it, if it is above the border."""
    least, last_tie = found
    if last_tie is not None:
        last_tie = last_tie.masked_fill(floor > least, _ALL)
    return torch.maximum(least, floor), last_tie


def _top_p(scores: Tensor, top_p: float) -> Border | None:
    """The border of the smallest set of likeliest tokens whose probability reaches top_p, scores [V].

    Of tokens that are equally likely at the border, those with the lowest ids are kept. None: all are.
    """
    (size,) = scores.shape
    logsum = torch.logsumexp(scores.double(), dim=0)
    for length in (*(n for n in _PREFIXES if n < size), size):
        ranked = torch.topk(scores, length).values  # descending
        count = int(length - _reached(ranked, logsum, top_p).sum()) + 1  # tokens to keep
        if count <= length:
            break
    else:
        return None  # rounding: not even all of them reach top_p
    least = ranked[count - 1 : count]
    ties = (scores == least).nonzero()[:, 0]  # ascending ids
    kept_ties = count - int((ranked[:count] > least).sum())
    return least, ties[kept_ties - 1 : kept_ties] if kept_ties < len(ties) else None


def _reached(ranked: Tensor, logsum: Tensor, top_p: float) -> Tensor:
    """[..., n] bool: whether the likelihoods of scores up to each of these [..., n] add up to top_p."""
    likely = (ranked.double() - logsum).exp_()
    if likely.device.type == "cpu":
        return likely.cumsum(dim=-1) >= top_p
    return likely.mul_(_UNITS).round_().to(torch.int64).cumsum(dim=-1) >= round(top_p * _UNITS)


def _sorted_borders(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """`border` of at most _TOGETHER rows, [W] each."""
    rows, size = scores.shape
    ranked, ids = F.pad(scores, (0, 0, 0, _TOGETHER - rows)).sort(dim=1, descending=True, stable=True)
    least = ranked.new_full((_TOGETHER, 1), -math.inf)
    last_tie = ids.new_full((_TOGETHER, 1), _ALL)
    if 0 < params.top_k < size:
        least = ranked[:, params.top_k - 1 : params.top_k]
    if params.top_p < 1.0:
        kept = ranked.masked_fill(ranked < least, -math.inf)
        logsum = torch.logsumexp(kept.double(), dim=1, keepdim=True)
        short = size - _reached(kept, logsum, params.top_p).sum(dim=1, keepdim=True)
        last = short.clamp(max=size - 1)
        cut = short < size  # or not even all of them reach top_p
        least = torch.where(cut, ranked.gather(1, last), least)
        last_tie = torch.where(cut, ids.gather(1, last), last_tie)
    if params.min_p > 0.0:
        floor = ranked[:, :1] + math.log(params.min_p)
        last_tie = last_tie.masked_fill(floor > least, _ALL)
        least = torch.maximum(least, floor)
    return least[:rows, 0], last_tie[:rows, 0]
