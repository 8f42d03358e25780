"""What `/stats` shows: the speed of the last answer and of all, in tables."""

from collections.abc import Callable
from pathlib import Path

from offspec.ui.chat.controller import Desk
from offspec.ui.chat.stats import Tally
from offspec_planners.units import format_bytes, format_number, format_rate, format_seconds


def report(desk: Desk) -> str:
    """What `/stats` shows, in Markdown: the last answer, all of them, and what they ran on."""
    figures, session, engine = desk.figures, desk.session, desk.engine
    columns = [("last answer", figures.answer), ("since the chat began", figures.session)]
    if not figures.session.passes:
        speed = "Nothing has been answered yet."
    else:
        speed = _table(["", *(name for name, _ in columns)], _rows([tally for _, tally in columns]))
    prompt = figures.prefill
    facts = [
        f"The conversation has {session.used:,} of {session.context:,} tokens of context.",
        f"The last prompt had {prompt.tokens:,} new tokens; {prompt.reused:,} were known." if prompt else "",
        guessed_by(figures.session),
        f"Target {desk.config.model}, draft {engine.draft}, trees of up to {engine.budget:,} nodes, "
        f"{engine.width:,} at a time.",
    ]
    return "\n\n".join(filter(None, [speed, *facts]))


def guessed_by(tally: Tally) -> str:
    """Who guessed what was accepted, where there was more than one to do so."""
    if len(tally.guessed) < 2:
        return ""
    counts = ", ".join(f"{Path(name).name} {count:,}" for name, count in tally.guessed)
    return f"Of the accepted guesses since the chat began, these came from each source: {counts}."


def _rows(tallies: list[Tally]) -> list[list[str]]:
    rows: list[tuple[str, Callable[[Tally], str]]] = [
        ("tokens", lambda tally: f"{tally.tokens:,}"),
        ("passes", lambda tally: f"{tally.passes:,}"),
        ("tokens per pass", lambda tally: format_number(tally.tokens_per_pass)),
        ("speed", lambda tally: f"{format_number(tally.tok_per_s)} tok/s"),
        ("time", lambda tally: format_seconds(tally.seconds)),
        ("time drafting", lambda tally: _share(tally.split.draft, tally.seconds)),
        ("time waiting for weights", lambda tally: _share(tally.split.link, tally.seconds)),
        ("time computing", lambda tally: _share(tally.split.compute, tally.seconds)),
    ]
    if any(tally.bytes_streamed for tally in tallies):
        rows += [
            ("streamed", lambda tally: format_bytes(tally.bytes_streamed)),
            ("streamed at", lambda tally: format_rate(tally.bytes_per_s)),
        ]
    return [[name, *map(shown, tallies)] for name, shown in rows]


def _share(seconds: float, total: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / total:.0%})" if total else "0 s"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
