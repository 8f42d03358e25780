"""Generated documents are up to date, and links resolve."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])


@pytest.mark.exhaustive
def test_command_line_page_equals_help() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_cli.py"), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.exhaustive
def test_screenshots_are_up_to_date() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "screenshots.py"), "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
