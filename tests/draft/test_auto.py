"""What `--draft auto` comes to, told in one line: the rule by scripted facts."""

from collections.abc import Collection

import pytest

from offspec.draft.auto import DraftChoice, choose_draft
from offspec.draft.published import KnownDraft

HEAD = KnownDraft("org/head", "eagle3", "one layer over states", "org/target")
SMALL = KnownDraft("org/small", "model", "a small model", "org/target")
TINY = KnownDraft("org/tiny", "model", "a smaller model", "org/target")


def _choose(
    known: tuple[KnownDraft, ...], here: Collection[str], fitting: Collection[str]
) -> tuple[DraftChoice, list[str]]:
    """The choice, and what was opened for it."""
    opened = list[str]()

    def obstacle(name: str) -> str | None:
        opened.append(name)
        return None if name in fitting else f"{name} takes too much"

    return choose_draft(known, lambda name: name in here, obstacle), opened


@pytest.mark.parametrize(
    ("known", "here", "fitting", "names", "opened", "words"),
    [
        # Nothing is known of the target: a substitute, of which there is nothing to tell.
        ((), (), ("substitute",), "substitute,suffix", "substitute", ()),
        # What was fetched before and fits; the best of these.
        (
            (HEAD, SMALL),
            ("org/head", "org/small"),
            ("org/head", "org/small", "substitute"),
            "org/head,suffix",
            "org/head",
            ("org/head", "one layer"),
        ),
        (
            (HEAD, SMALL),
            ("org/small",),
            ("org/small", "org/head"),
            "org/small,suffix",
            "org/small",
            ("a small model",),
        ),
        # Here, but too large: a substitute, and why.
        (
            (SMALL,),
            ("org/small",),
            ("substitute",),
            "substitute,suffix",
            "org/small,substitute",
            ("org/small takes too much",),
        ),
        # A head could be had, and is named; a small model is no better than a substitute.
        (
            (HEAD,),
            (),
            ("org/head", "substitute"),
            "substitute,suffix",
            "substitute",
            ('`draft="org/head"`', "trained head"),
        ),
        ((SMALL,), (), ("substitute",), "substitute,suffix", "substitute", ()),
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
        ((), (), (), "suffix", "substitute", ("suffix alone", "substitute takes too much")),
        (
            (HEAD, SMALL),
            ("org/small",),
            (),
            "suffix",
            "org/small,substitute,org/head",
            ("suffix alone", "org/small", "substitute", "org/head"),
        ),
    ],
)
def test_the_rule(
    known: tuple[KnownDraft, ...],
    here: tuple[str, ...],
    fitting: tuple[str, ...],
    names: str,
    opened: str,
    words: tuple[str, ...],
) -> None:
    choice, tried = _choose(known, here, fitting)
    assert choice.names == tuple(names.split(","))
    assert tried == opened.split(",")
    assert bool(choice.line) == bool(words) and "\n" not in choice.line
    assert all(word in choice.line for word in words)
