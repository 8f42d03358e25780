"""Score cutoffs of the filters top_k, top_p and min_p, which apply in this order.

Letters: V vocabulary, W rows.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.core.config import SamplingParams
from offspec_kernels.gumbel_argmax import mask_below

Cutoff = tuple[Tensor, Tensor | None]  # `least` and `last_tie` of `mask_below`, one of each per row

# Numbers of likeliest tokens that top_p tries before it sorts the whole vocabulary, which takes milliseconds
# on a CPU.
_PREFIXES = (256, 4096)

_TOGETHER = 4  # rows that a device sorts at once (a fixed number), at 40 bytes per token and row
_UNITS = 2.0**52  # per unit of probability: sums of integers do not depend on the order of a GPU's scan
_ALL = torch.iinfo(torch.int64).max  # `last_tie` if all ties are kept


def cutoffs(scores: Tensor, params: SamplingParams) -> Cutoff:
    """Return the cutoffs of W rows [W, V] float32: least [W] float32 and last_tie [W] int64 (None: all ties).

    Several rows are sorted at once without a device synchronization. A CPU is faster with single rows.
    """
    if scores.device.type == "cpu" and len(scores) == 1:
        return cutoff(scores[0], params)
    parts = [_sorted_cutoffs(part, params) for part in scores.split(_TOGETHER)]
    return torch.cat([least for least, _ in parts]), torch.cat([tie for _, tie in parts])


def cutoff(scores: Tensor, params: SamplingParams) -> Cutoff:
    """Return the cutoff of a row [V]: least [1], and last_tie [1] or None."""
    found: Cutoff = scores.new_full((1,), -math.inf), None
    kept = scores
    if 0 < params.top_k < len(scores):
        found = torch.topk(scores, params.top_k).values[-1:], None  # all ties are kept
        kept = mask_below(scores.clone(), *found)
    if params.top_p < 1.0:
        found = _top_p(kept, params.top_p) or found
    if params.min_p > 0.0:
        # p < min_p * p_max, without a softmax.
        found = _raised(found, scores.amax(dim=0, keepdim=True) + math.log(params.min_p))
    return found


def _raised(found: Cutoff, floor: Tensor) -> Cutoff:
    """Return the higher of a cutoff and a floor. A floor above the cutoff keeps all its ties."""
    least, last_tie = found
    if last_tie is not None:
        last_tie = last_tie.masked_fill(floor > least, _ALL)
    return torch.maximum(least, floor), last_tie


def _top_p(scores: Tensor, top_p: float) -> Cutoff | None:
    """Return the cutoff of the smallest set of likeliest tokens whose probability reaches top_p, scores [V].

    Among ties at the cutoff the tokens with the lowest ids are kept. None: all tokens are kept.
    """
    (size,) = scores.shape
    logsum = torch.logsumexp(scores.double(), dim=0)
    for length in (*(n for n in _PREFIXES if n < size), size):
        ranked = torch.topk(scores, length).values  # descending
        count = int(length - _reached(ranked, logsum, top_p).sum()) + 1  # tokens to keep
        if count <= length:
            break
    else:
        return None  # due to rounding, not even all tokens reach top_p
    least = ranked[count - 1 : count]
    ties = (scores == least).nonzero()[:, 0]  # ascending ids
    kept_ties = count - int((ranked[:count] > least).sum())
    return least, ties[kept_ties - 1 : kept_ties] if kept_ties < len(ties) else None


def _reached(ranked: Tensor, logsum: Tensor, top_p: float) -> Tensor:
    """Return [..., n] bool: whether the cumulative probability of sorted scores [..., n] reaches top_p."""
    likely = (ranked.double() - logsum).exp_()
    if likely.device.type == "cpu":
        return likely.cumsum(dim=-1) >= top_p
    return likely.mul_(_UNITS).round_().to(torch.int64).cumsum(dim=-1) >= round(top_p * _UNITS)


def _sorted_cutoffs(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the cutoffs of at most _TOGETHER rows, [W] each."""
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
        cut = short < size  # otherwise not even all tokens reach top_p
        least = torch.where(cut, ranked.gather(1, last), least)
        last_tie = torch.where(cut, ids.gather(1, last), last_tie)
    if params.min_p > 0.0:
        floor = ranked[:, :1] + math.log(params.min_p)
        last_tie = last_tie.masked_fill(floor > least, _ALL)
        least = torch.maximum(least, floor)
    return least[:rows, 0], last_tie[:rows, 0]
