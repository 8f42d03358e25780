"""What `--draft auto` comes to, told in one line: the rule by scripted facts."""

from collections.abc import Collection

import pytest

from offspec.draft.published import DraftChoice, KnownDraft, choose_draft

HEAD = KnownDraft("org/head", "eagle3", "one layer over states", "org/target")
LARGE = KnownDraft("org/large", "model", "half of the target", "org/target", 1 / 2)
SMALL = KnownDraft("org/small", "model", "a small model", "org/target", 1 / 8)
TINY = KnownDraft("org/tiny", "model", "a smaller model", "org/target", 1 / 40)


def _choose(
    known: tuple[KnownDraft, ...], here: Collection[str], fitting: Collection[str], *, fetches: bool = False
) -> tuple[DraftChoice, list[str]]:
    """The choice, and what was opened for it."""
    opened = list[str]()

    def obstacle(name: str) -> str | None:
        opened.append(name)
        return None if name in fitting else f"{name} takes too much"

    return choose_draft(known, lambda name: name in here, obstacle, fetches=fetches), opened


BOTH = "org/head", "org/small"
Words = tuple[str, ...]


@pytest.mark.parametrize(
    ("known", "here", "fitting", "names", "opened", "words"),
    [
        # Nothing is known of the target: a substitute, of which there is nothing to tell.
        ((), (), ("substitute",), "substitute,suffix", "substitute", ()),
        # What was fetched before and fits; the best of these.
        ((HEAD, SMALL), BOTH, BOTH, "org/head,suffix", "org/head", ("org/head", "one layer")),
        ((HEAD, SMALL), BOTH[1:], BOTH, "org/small,suffix", "org/small", ("a small model",)),
        # Here, but too large: a substitute, and why.
        (
            (SMALL,),
            ("org/small",),
            ("substitute",),
            "substitute,suffix",
            "org/small,substitute",
            ("org/small takes too much",),
        ),
        # A head could be had, or a small model, and is named.
        (
            (HEAD,),
            (),
            ("org/head", "substitute"),
            "substitute,suffix",
            "substitute",
            ('`draft="org/head"`', "trained head"),
        ),
        (
            (SMALL, TINY),
            (),
            ("substitute",),
            "substitute,suffix",
            "substitute",
            ('`draft="org/small"`', "a small model of its family may be faster"),
        ),
        # A model that is hardly smaller than the target is here: it drafts too slowly.
        ((LARGE,), ("org/large",), ("org/large", "substitute"), "substitute,suffix", "substitute", ()),
        # No room for a substitute: what can be fetched, a head or else the smallest model.
        (
            (HEAD, SMALL),
            (),
            ("org/head",),
            "org/head,suffix",
            "substitute,org/head",
            ("org/head", "since substitute takes too much"),
        ),
        ((SMALL, TINY), (), ("org/tiny",), "org/tiny,suffix", "substitute,org/tiny", ("org/tiny",)),
        # Nothing fits.
        ((HEAD, SMALL), BOTH[1:], (), "suffix", "org/small,substitute,org/head", ("suffix alone", *BOTH)),
    ],
)
def test_the_rule(
    known: tuple[KnownDraft, ...], here: Words, fitting: Words, names: str, opened: str, words: Words
) -> None:
    choice, tried = _choose(known, here, fitting)
    assert choice.names == tuple(names.split(","))
    assert tried == opened.split(",")
    assert bool(choice.line) == bool(words) and "\n" not in choice.line
    assert all(word in choice.line for word in words)


@pytest.mark.parametrize(
    ("known", "here", "fitting", "names", "opened"),
    [
        # The largest small model goes before a substitute, and a head that is here before both.
        ((HEAD, LARGE, SMALL, TINY), (), ("org/small", "substitute"), "org/small", "org/small"),
        ((HEAD, SMALL), ("org/head",), BOTH, "org/head", "org/head"),
        ((SMALL, TINY), (), ("org/tiny", "substitute"), "org/tiny", "org/small,org/tiny"),
        # None fits: a substitute, or a head; no model is tried twice.
        ((HEAD, SMALL), (), ("substitute",), "substitute", "org/small,substitute"),
        ((HEAD, SMALL), (), ("org/head",), "org/head", "org/small,substitute,org/head"),
        ((SMALL, TINY), (), (), "", "org/small,org/tiny,substitute"),
    ],
)
def test_the_rule_where_drafts_may_be_fetched(
    known: tuple[KnownDraft, ...], here: Words, fitting: Words, names: str, opened: str
) -> None:
    choice, tried = _choose(known, here, fitting, fetches=True)
    assert choice.names == (*filter(None, [names]), "suffix")
    assert tried == opened.split(",") and choice.line
