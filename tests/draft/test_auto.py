"""Choice of `--draft auto` and its one-line notice, by scripted facts."""

from collections.abc import Collection

import pytest

from offspec.draft.known_drafts import DraftChoice, KnownDraft, choose_draft

HEAD = KnownDraft("org/head", "eagle3", "one layer over states", "org/target")
LARGE = KnownDraft("org/large", "model", "half of the target", "org/target", 1 / 2)
SMALL = KnownDraft("org/small", "model", "a small model", "org/target", 1 / 8)
TINY = KnownDraft("org/tiny", "model", "a smaller model", "org/target", 1 / 40)


def _choose(
    known: tuple[KnownDraft, ...], here: Collection[str], fitting: Collection[str], *, fetches: bool = False
) -> tuple[DraftChoice, list[str]]:
    """Return the choice, and the drafts opened for it."""
    opened = list[str]()

    def obstacle(name: str) -> str | None:
        opened.append(name)
        return None if name in fitting else f"{name} takes too much"

    return choose_draft(known, lambda name: name in here, obstacle, may_download=fetches), opened


BOTH = "org/head", "org/small"
Words = tuple[str, ...]


@pytest.mark.parametrize(
    ("known", "here", "fitting", "names", "opened", "words"),
    [
        # No known draft for the target: a self-draft, without a notice.
        ((), (), ("self",), "self,suffix", "self", ()),
        # The best of the cached drafts that fit.
        ((HEAD, SMALL), BOTH, BOTH, "org/head,suffix", "org/head", ("org/head", "one layer")),
        ((HEAD, SMALL), BOTH[1:], BOTH, "org/small,suffix", "org/small", ("a small model",)),
        # Cached, but too large: a self-draft, and the reason.
        (
            (SMALL,),
            ("org/small",),
            ("self",),
            "self,suffix",
            "org/small,self",
            ("org/small takes too much",),
        ),
        # A head or a small model is available, and is named.
        (
            (HEAD,),
            (),
            ("org/head", "self"),
            "self,suffix",
            "self",
            ('`draft="org/head"`', "trained head"),
        ),
        (
            (SMALL, TINY),
            (),
            ("self",),
            "self,suffix",
            "self",
            ('`draft="org/small"`', "a small model of its family may be faster"),
        ),
        # A cached model hardly smaller than the target drafts too slowly.
        ((LARGE,), ("org/large",), ("org/large", "self"), "self,suffix", "self", ()),
        # No room for a self-draft: a download, a head or else the smallest model.
        (
            (HEAD, SMALL),
            (),
            ("org/head",),
            "org/head,suffix",
            "self,org/head",
            ("org/head", "since self takes too much"),
        ),
        ((SMALL, TINY), (), ("org/tiny",), "org/tiny,suffix", "self,org/tiny", ("org/tiny",)),
        # Nothing fits.
        ((HEAD, SMALL), BOTH[1:], (), "suffix", "org/small,self,org/head", ("suffix alone", *BOTH)),
    ],
)
def test_choice_without_downloads(
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
        # The largest small model is preferred to a self-draft, and a cached head to both.
        ((HEAD, LARGE, SMALL, TINY), (), ("org/small", "self"), "org/small", "org/small"),
        ((HEAD, SMALL), ("org/head",), BOTH, "org/head", "org/head"),
        ((SMALL, TINY), (), ("org/tiny", "self"), "org/tiny", "org/small,org/tiny"),
        # None fits: a self-draft, or a head; no model is tried twice.
        ((HEAD, SMALL), (), ("self",), "self", "org/small,self"),
        ((HEAD, SMALL), (), ("org/head",), "org/head", "org/small,self,org/head"),
        ((SMALL, TINY), (), (), "", "org/small,org/tiny,self"),
    ],
)
def test_choice_with_downloads(
    known: tuple[KnownDraft, ...], here: Words, fitting: Words, names: str, opened: str
) -> None:
    choice, tried = _choose(known, here, fitting, fetches=True)
    assert choice.names == (*filter(None, [names]), "suffix")
    assert tried == opened.split(",") and choice.line
