"""Whether an answer is what decoding without speculation gives."""

from collections.abc import Sequence

from offspec.core.events import Mismatch, Result


def compared(result: Result, gaps: Sequence[float], alone: Result) -> tuple[Mismatch, ...] | None:
    """The first place where an answer differs from that of one token a pass; what follows it is another text.

    Args:
        result: The answer.
        gaps: Of each of its tokens, see `Walk`.
        alone: The other; where it was halted and all is alike so far, nothing is known: None.
    """
    tokens, others = result.token_ids, alone.token_ids
    for place, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return (Mismatch(place, token, other, gaps[place]),)
    if alone.finish_reason == "halted":
        return None
    if (len(tokens), result.finish_reason) == (len(others), alone.finish_reason):
        return ()
    place = min(len(tokens), len(others))  # one of them ended there, or they ended for other reasons
    said, unspeculated = (ids[place] if place < len(ids) else None for ids in (tokens, others))
    return (Mismatch(place, said, unspeculated, 0.0),)
