"""Chi-squared test of counts against probabilities."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

from scipy.stats import chisquare

Outcome = TypeVar("Outcome", bound=Hashable)


def p_value(counts: Counter[Outcome], probabilities: Mapping[Outcome, float]) -> float:
    """Return the p-value of a chi-squared test of all counts against the probabilities of their outcomes.

    Outcomes expected less than five times are pooled. The result is 0 if an impossible outcome occurred.
    """
    total = counts.total()
    if any(not probabilities.get(outcome) for outcome in counts):
        return 0.0
    common = [outcome for outcome, likely in probabilities.items() if likely * total >= 5]
    assert len(common) > 3, "too few outcomes for a test"
    observed = [counts[outcome] for outcome in common]
    expected = [probabilities[outcome] * total for outcome in common]
    if total > sum(observed):
        observed, expected = [*observed, total - sum(observed)], [*expected, total - sum(expected)]
    scale = sum(observed) / sum(expected)  # 1 except for rounding, and for rare outcomes that never occurred
    return float(chisquare(observed, [share * scale for share in expected]).pvalue)
