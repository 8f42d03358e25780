"""The page of `/stats`: speed of the last answer and of all answers, as tables."""

from collections.abc import Callable, Sequence
from pathlib import Path

from offspec.core.sampling_defaults import describe_values, sampling_values
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.stats import Totals
from offspec_planners.units import format_bytes, format_number, format_rate, format_seconds


def report(chat: ChatController) -> str:
    """Return the page of `/stats` in Markdown: last answer, all answers, and the configuration."""
    stats, session, engine = chat.stats, chat.session, chat.engine
    columns = [("last answer", stats.answer), ("since the chat began", stats.session)]
    if not stats.session.passes:
        speed = "No question has been answered yet."
    else:
        speed = _table(["", *(name for name, _ in columns)], _rows([totals for _, totals in columns]))
    prompt = stats.prefill
    facts = [
        f"The conversation uses {session.used:,} of {session.context:,} tokens of context.",
        f"Questions dropped from its beginning: {session.left_out:,}." if session.left_out else "",
        f"The last prompt had {prompt.tokens:,} new tokens; {prompt.reused:,} were cached." if prompt else "",
        format_accepted_by_source(stats.session),
        _computed_on(engine.placement["gpu_names"]),
        f"Sampling: {describe_values(sampling_values(session.params))}.",
        f"Target {chat.config.model}, draft {engine.draft}, {_trees(engine.budget, engine.width)}.",
    ]
    return "\n\n".join(filter(None, [speed, *facts]))


def _computed_on(gpus: Sequence[str]) -> str:
    return f"Computed on {' and '.join(gpus)}." if gpus else "Computed on the CPU, not on a GPU."


def _trees(budget: int, width: int) -> str:
    return (
        f"trees of up to {budget:,} nodes, {width:,} per draft step" if budget > 1 else "one token per pass"
    )


def format_accepted_by_source(totals: Totals) -> str:
    """Return the accepted tokens of each draft source, or "" for a single source."""
    if len(totals.accepted_by_source) < 2:
        return ""
    counts = ", ".join(f"{Path(name).name} {count:,}" for name, count in totals.accepted_by_source)
    return f"Accepted draft tokens of each source since the chat began: {counts}."


def _rows(answers: list[Totals]) -> list[list[str]]:
    rows: list[tuple[str, Callable[[Totals], str]]] = [
        ("tokens", lambda totals: f"{totals.tokens:,}"),
        ("passes", lambda totals: f"{totals.passes:,}"),
        ("tokens per pass", lambda totals: format_number(totals.tokens_per_pass)),
        ("speed", lambda totals: f"{format_number(totals.tok_per_s)} tok/s"),
        ("time", lambda totals: format_seconds(totals.seconds)),
        ("time drafting", lambda totals: _share(totals.times.draft, totals.seconds)),
        ("time waiting for weights", lambda totals: _share(totals.times.link, totals.seconds)),
        ("time computing", lambda totals: _share(totals.times.compute, totals.seconds)),
    ]
    if any(totals.paused for totals in answers):
        rows.insert(3, ("passes with drafting paused", lambda totals: f"{totals.paused:,}"))
    if any(totals.bytes_streamed for totals in answers):
        rows += [
            ("streamed", lambda totals: format_bytes(totals.bytes_streamed)),
            ("streamed at", lambda totals: format_rate(totals.bytes_per_s)),
        ]
    if any(totals.bytes_read not in (0, totals.bytes_streamed) for totals in answers):
        rows.append(("read from disk", lambda totals: format_bytes(totals.bytes_read)))
    return [[name, *map(shown, answers)] for name, shown in rows]


def _share(seconds: float, total: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / total:.0%})" if total else "0 s"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
