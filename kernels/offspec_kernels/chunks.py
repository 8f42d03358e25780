"""Splitting work into parts."""


def split_evenly(start: int, end: int, most: int) -> list[slice]:
    """Split [start, end) evenly into parts of at most `most`; a part of one row would round differently."""
    count, parts = end - start, -(-(end - start) // most)
    return [slice(start + count * i // parts, start + count * (i + 1) // parts) for i in range(parts)]
