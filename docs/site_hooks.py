"""Hooks of mkdocs: add pages from outside of docs/, and rewrite links for the site.

In the repository links go from file to file, such as `../bench/LOG.md`. In the site docs/ is the root.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
# Files outside of docs/, by their path in the repository: their path in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "LICENSE": "LICENSE.txt",
    "bench/README.md": "bench/README.md",
    "bench/LOG.md": "bench/LOG.md",
    "examples/summarize.py": "examples/summarize.py",
}
_INSIDE = {site: repository for repository, site in OUTSIDE.items()}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")


def in_site(path: str) -> str:
    """Path in the site of a file of the repository; unchanged if it has none, which mkdocs reports."""
    return OUTSIDE.get(path, path.removeprefix("docs/"))


def relinked(markdown: str, page: str) -> str:
    """The text of a page with its links as they are in the site. page: its path there."""
    here = dirname(_INSIDE.get(page, f"docs/{page}"))

    def moved(link: re.Match[str]) -> str:
        return relpath(in_site(normpath(join(here, link[1]))), dirname(page) or ".")

    return _LINK.sub(moved, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: adds the files outside of docs/."""
    from mkdocs.structure.files import File

    for repository, site in OUTSIDE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / repository)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return relinked(markdown, page.file.src_uri)
