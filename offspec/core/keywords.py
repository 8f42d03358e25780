"""Keyword arguments that a function does not take: the error names the right place or the nearest name."""

from collections.abc import Collection, Iterable, Mapping


def check_keywords(
    given: Iterable[str], known: Collection[str], what: str, elsewhere: Mapping[str, Collection[str]]
) -> None:
    """Raise TypeError for the first keyword that is not known.

    Args:
        given: Names as the caller wrote them.
        known: Names that are taken.
        what: What such a keyword is called, such as "setting".
        elsewhere: Names that belong to another call, by a hint that says to which; "{}" is for the name.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"there is no {what} {name!r}: {_hint(name, known, elsewhere)}")


def _hint(name: str, known: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    from difflib import get_close_matches

    places = {each: place for place, names in elsewhere.items() for each in names}
    near = [name] if name in places else get_close_matches(name, [*known, *places], n=1)
    if not near:
        return f"there are {', '.join(known)}"
    meant = [] if near == [name] else [f"did you mean {near[0]!r}?"]
    place = [] if near[0] in known else [places[near[0]].format(near[0])]
    return " ".join(meant + place)
