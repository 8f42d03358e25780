"""Cutting work into parts."""


def split_evenly(start: int, end: int, most: int) -> list[slice]:
    """[start, end) in parts of at most `most`, as even as can be: a lone one would round otherwise."""
    count, parts = end - start, -(-(end - start) // most)
    return [slice(start + count * i // parts, start + count * (i + 1) // parts) for i in range(parts)]
