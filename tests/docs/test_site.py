"""Documentation site: configuration, links, and no resources from other hosts."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import offspec
from docs import check_site, site_hooks
from docs.make_quickstart import renewed

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
PAGES = {page.name for page in (ROOT / "docs").glob("*.md")}
OUTSIDE = {site for site in site_hooks.OUTSIDE.values() if site.endswith(".md")}


def _pages(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for where in entry.values():
            yield from _pages(where) if isinstance(where, list) else [where]


def test_fonts_and_scripts_are_local() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "extra_javascript" not in CONFIG
    assert not re.search("//|cdn", (ROOT / "mkdocs.yml").read_text("utf-8"))


def test_every_page_is_in_the_navigation() -> None:
    placed = list(_pages(CONFIG["nav"]))
    assert len(placed) == len(set(placed))
    assert set(placed) == PAGES | OUTSIDE
    assert all((ROOT / path).exists() for path in site_hooks.OUTSIDE)


def test_every_public_name_is_in_the_reference() -> None:
    named = re.findall(r"^::: offspec\.(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(set(offspec.__all__) - {"__version__"})


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda it: it.name)
def test_images_load_nothing(picture: Path) -> None:
    assert check_site.loads(picture.read_text("utf-8"), ".svg") == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('<script src="https://a.example/x.js"></script>', ".html"),
        ('<link rel="stylesheet" href="//a.example/x.css">', ".html"),
        ('<link rel="preconnect" href="https://a.example">', ".html"),
        ('<img src="x.png" srcset="x.png 1x, https://a.example/y.png 2x">', ".html"),
        ('<p style="background: url(https://a.example/x.png)">', ".html"),
        ("<style>@import 'https://a.example/x.css';</style>", ".html"),
        ("@font-face { src: local(x), url('//a.example/x.woff2') }", ".css"),
        ('<svg><image href="https://a.example/x.png"/></svg>', ".svg"),
    ],
)
def test_external_resources_are_detected(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / f"page{kind}").write_text(text, "utf-8")
    (found,) = check_site.check(tmp_path)
    assert found.startswith(f"page{kind} loads ") and "//a.example" in found


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://a.example">',
        '<link rel="canonical" href="https://a.example"><link rel="icon" href="x.png">',
        '<script src="x.js"></script><p>url(https://a.example)',
        '<svg xmlns="http://www.w3.org/2000/svg"><style>a { fill: url(#b) }</style></svg>',
    ],
)
def test_links_are_not_resources(text: str) -> None:
    assert check_site.loads(text, ".html") == []


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "docs/chat.md", "chat.md"),  # README.md
        ("index.md", "LICENSE", "LICENSE.txt"),
        ("index.md", "docs/images/chat.svg", "images/chat.svg"),
        ("figures.md", "../bench/LOG.md", "bench/LOG.md"),
        ("figures.md", "../README.md", "index.md"),
        ("bench/README.md", "../docs/chat.md", "../chat.md"),
        ("bench/README.md", "LOG.md", "LOG.md"),
        ("chat.md", "drafts.md#heads", "drafts.md#heads"),
        ("chat.md", "#heads", "#heads"),
        ("chat.md", "https://a.example/docs/x", "https://a.example/docs/x"),
    ],
)
def test_links_are_rewritten_for_the_site(page: str, link: str, there: str) -> None:
    assert site_hooks.relinked(f"see [this]({link}) now", page) == f"see [this]({there}) now"


PLAN = """
MODEL: about 4.59 tok/s
in 60.62 GB of RAM

Machine
  RAM    67.35 GB

Placement of the layers
   0 ▒█▒ 3
  █ VRAM: 1 layer   ▒ RAM: 2 layers
  1 layer    VRAM    1 GB

Expected speed, and its bottleneck
  a pass     2 s

Possible improvements
  RAM
"""
SHORTENED = """MODEL: about 4.59 tok/s
in 60.62 GB of RAM

Placement of the layers
   0 ▒█▒ 3
  █ VRAM: 1 layer   ▒ RAM: 2 layers

Expected speed, and its bottleneck
  a pass     2 s
"""


def test_only_plans_of_the_quick_start_are_renewed() -> None:
    page = "<!-- offspec plan A --memory 12GB -->\n```text\n{}```\n\nAnd:\n\n```\noffspec plan B\n```\n"
    asked: list[list[str]] = []

    def plan(words: list[str]) -> str:
        asked.append(words)
        return PLAN

    for before in ("", "old\n\nlines\n"):
        assert renewed(page.format(before), plan) == page.format(SHORTENED)
    assert asked == [["plan", "A", "--memory", "12GB"]] * 2


def test_quick_start_plans_match_their_commands() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    shown = re.findall(r"<!-- (offspec plan .*?) -->\n```text\n(.*): about", page)
    assert len(shown) == page.count("<!--") and shown
    for command, model in shown:
        assert f"\n{command}\n" in page and command.split()[2] == model
