"""Generated documents are up to date, and links resolve."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


@pytest.mark.exhaustive
def test_the_command_line_page_is_what_help_prints() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_cli.py"), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.exhaustive
def test_the_pictures_are_what_the_chat_looks_like() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "screenshots.py"), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
