"""Acceptance rate of continuations found in a text, counted during generation.

After a long match a text usually continues as before, after a short one seldom, and more likely the more
often it did so. The rate depends on the target and the request, so each case is counted separately: `bucket`
classifies draft tokens by the length of the match, by the continuation's share of all continuations there,
and by its count.
"""

_LENGTHS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7)  # class of a match, by its length in tokens
_SURE = (0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 0.9, 0.95)  # of an only continuation, before any observation
_SHARES = (1.0, 0.5, 0.2, 0.0)  # classes of shares: all, at least half, a fifth, less
_TYPICAL = (1.0, 0.65, 0.3, 0.08)
_COUNTS = (0, 0, 1, 1, 2)  # class of a count: one, two or three, more
_DOUBT = (1.0, 0.8, 0.6)  # remaining doubt at such counts
_PRIOR = 4.0  # observations that the prior counts as
_KEPT = 0.995  # decay of the observations, from pass to pass

_CASES = len(_SHARES) * (_COUNTS[-1] + 1)
BUCKETS = 2 * (_LENGTHS[-1] + 1) * _CASES


def bucket(matched: int, count: int, total: int, longest: bool) -> int:
    """Return the bucket of a token that followed a match of `matched` tokens `count` of `total` times.

    longest: whether no longer match has other continuations; if one has, the bucket covers tokens to be
    accepted if none of those is picked.
    """
    case = 0 if count == total else 1 if 2 * count >= total else 2 if 5 * count >= total else 3
    often = _COUNTS[count] if count < 4 else 2
    length = _LENGTHS[matched] if matched < 17 else 7
    return ((longest * 8 + length) * len(_SHARES) + case) * 3 + often


class MatchAcceptance:
    """Acceptance rate of each bucket, starting from a prior.

    Observations decay by 0.5 % per pass.
    """

    def __init__(self) -> None:
        self._weight = [_PRIOR] * BUCKETS
        self._hits = [_PRIOR * _prior(index) for index in range(BUCKETS)]

    def probability(self, index: int) -> float:
        """Return the probability that the target picks a token of this bucket, above 0 and below 1."""
        return self._hits[index] / self._weight[index]

    def learn(self, index: int, hit: bool) -> None:
        """Count whether the target picked a token of this bucket."""
        self._weight[index] += 1.0
        self._hits[index] += hit

    def end_pass(self) -> None:
        """Let the observations decay towards the prior."""
        back = 1.0 - _KEPT
        # An interrupt between these two lines must not leave a probability above 1.
        self._hits = [
            _KEPT * hits + back * prior for hits, prior in zip(self._hits, _PRIOR_HITS, strict=True)
        ]
        self._weight = [_KEPT * weight + back * _PRIOR for weight in self._weight]


def _prior(index: int) -> float:
    rest, often = divmod(index, _COUNTS[-1] + 1)
    rest, share = divmod(rest, len(_SHARES))
    doubt = (1.0 - _SURE[rest % len(_SURE)]) * _DOUBT[often]
    return (1.0 - doubt) * _TYPICAL[share]


_PRIOR_HITS = [_PRIOR * _prior(index) for index in range(BUCKETS)]
