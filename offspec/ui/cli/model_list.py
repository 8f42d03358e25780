"""`offspec plan list`: well-known models, what they take, and which of them run on this machine."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import ConsoleRenderable

from offspec.checkpoint.shapes import KnownSize
from offspec.ui.cli.tables import PageLayout, facts, listing, plain, prose

_HEADS = ("MODEL", "disk", "least RAM", "least GPU", "runs here")
_FIGURES = 50  # columns that all but the name take


def sections(sizes: Mapping[str, KnownSize], ram: int, layout: PageLayout) -> Iterator[ConsoleRenderable]:
    """A table of models, and notes on it.

    Args:
        sizes: By hub id.
        ram: Bytes of RAM that may be used here.
        layout: Of the page.
    """
    rows = [(name, *_figures(size), _verdict(size, ram)) for name, size in sizes.items()]
    if max(len(row[0]) for row in rows) + _FIGURES > layout.width:
        yield facts(
            [
                (name, disk, f"least RAM {least}: {here}" if least else here)
                for name, disk, least, _, here in rows
            ],
            layout,
        )
    else:
        yield listing(_HEADS, (False, True, True, True, False), rows, layout)
    yield plain("")
    yield prose(_notes(sizes, ram), layout)


def to_json(sizes: Mapping[str, KnownSize], ram: int) -> list[dict[str, Any]]:
    """The same for programs: null for sizes of a model that is refused."""
    return [
        {
            "name": name,
            "bytes": size.nbytes or None,
            "least_memory": size.least_ram or None,
            "least_vram": size.least_vram or None,
            "runs": not size.refused and size.least_ram <= ram,
            "refused": size.refused or None,
        }
        for name, size in sizes.items()
    ]


def _figures(size: KnownSize) -> tuple[str, str, str]:
    disk, ram, vram = (f"{nbytes / 1e9:.{digits}f} GB" for nbytes, digits in _digits(size))
    return ("", "", "") if size.refused else (disk, ram, vram)


def _digits(size: KnownSize) -> list[tuple[int, int]]:
    return [(size.nbytes, 0 if size.nbytes > 1e11 else 1), (size.least_ram, 1), (size.least_vram, 1)]


def _verdict(size: KnownSize, ram: int) -> str:
    if size.refused:
        return "cannot run"
    return "yes" if size.least_ram <= ram else "too little RAM"


def _notes(sizes: Mapping[str, KnownSize], ram: int) -> Iterator[str]:
    yield f"{ram / 1e9:.1f} GB of RAM may be used here; free disk space is not looked at."
    yield "Least RAM is without a GPU, least GPU the memory of one; more of either is faster."
    yield "`offspec plan MODEL --hardware NAME` predicts the speed, with --quantize nf4 in 4 bits."
    for reason in dict.fromkeys(size.refused for size in sizes.values() if size.refused):
        names = [name for name, size in sizes.items() if size.refused == reason]
        yield f"{' and '.join(names)} cannot run: {reason}."
