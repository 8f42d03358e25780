"""How likely a continuation found in a text is to be accepted, counted while text is generated.

After a long match the text will mostly go on as it did before, after a short one seldom, and the more so the
more often it did. How much so depends on the target and on what it is asked, so each case is counted by
itself: `bucket` sorts guesses by the length of the match, by the share of the continuation among all that
followed there, and by its count.
"""

_LENGTHS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7)  # class of a match, by its length in tokens
_SURE = (0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 0.9, 0.95)  # of an only continuation, before anything is seen
_SHARES = (1.0, 0.5, 0.2, 0.0)  # classes of shares: all, at least half, a fifth, less
_TYPICAL = (1.0, 0.65, 0.3, 0.08)
_COUNTS = (0, 0, 1, 1, 2)  # class of a count: one, two or three, more
_DOUBT = (1.0, 0.8, 0.6)  # what is left of the doubt at such counts
_PRIOR = 4.0  # visits that the prior stands for
_KEPT = 0.995  # of what was seen, from pass to pass

_CASES = len(_SHARES) * (_COUNTS[-1] + 1)
BUCKETS = 2 * (_LENGTHS[-1] + 1) * _CASES


def bucket(matched: int, count: int, total: int, longest: bool) -> int:
    """The case of a token that followed a match of `matched` tokens `count` of `total` times.

    longest: whether no longer match has other continuations; where one has, this says what the token is
    worth if none of those is picked.
    """
    case = 0 if count == total else 1 if 2 * count >= total else 2 if 5 * count >= total else 3
    often = _COUNTS[count] if count < 4 else 2
    length = _LENGTHS[matched] if matched < 17 else 7
    return ((longest * 8 + length) * len(_SHARES) + case) * 3 + often


class Matches:
    """The share of hits in each bucket, with a prior from which it departs as guesses are judged.

    What is seen weighs less by 0.5 % with every pass.
    """

    def __init__(self) -> None:
        self._weight = [_PRIOR] * BUCKETS
        self._hits = [_PRIOR * _prior(index) for index in range(BUCKETS)]

    def probability(self, index: int) -> float:
        """The probability that the target picks a token of this bucket, above 0 and below 1."""
        return self._hits[index] / self._weight[index]

    def learn(self, index: int, hit: bool) -> None:
        """The target picked such a token, or might have and did not."""
        self._weight[index] += 1.0
        self._hits[index] += hit

    def end_pass(self) -> None:
        """Let what was seen fade, and the prior return."""
        back = 1.0 - _KEPT
        # In this order: an interrupt in between then leaves no probability above 1.
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
