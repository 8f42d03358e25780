"""Whether what was counted follows the law that it should."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

from scipy.stats import chisquare

Outcome = TypeVar("Outcome", bound=Hashable)


def p_value(counts: Counter[Outcome], probabilities: Mapping[Outcome, float]) -> float:
    """The p-value of a chi-squared test of all counts against the probabilities of their outcomes.

    Outcomes that are expected less than five times are counted together. 0 where the impossible was seen.
    """
    total = counts.total()
    if any(not probabilities.get(outcome) for outcome in counts):
        return 0.0
    common = [outcome for outcome, likely in probabilities.items() if likely * total >= 5]
    assert len(common) > 3, "too few outcomes to tell anything"
    observed = [counts[outcome] for outcome in common]
    wanted = [probabilities[outcome] * total for outcome in common]
    if total > sum(observed):
        observed, wanted = [*observed, total - sum(observed)], [*wanted, total - sum(wanted)]
    scale = sum(observed) / sum(wanted)  # 1 but for rounding, and for rare outcomes of which none was seen
    return float(chisquare(observed, [share * scale for share in wanted]).pvalue)
