"""Report what a built site loads from elsewhere: scripts, styles, fonts, images, but no links to follow.

python docs/check_site.py build/site    exit 1 when there is anything
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_ADDRESS = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
_IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s;]+)""", re.IGNORECASE)
_LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),  # of SVG, as `use` is
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
_NOT_LOADED = {"alternate", "author", "canonical", "edit", "license", "next", "prev"}  # kinds of <link>


class _Loads(HTMLParser):
    """Parser of the addresses elsewhere that a page makes its browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self._tag = ""  # the latest that began

    def handle_data(self, data: str) -> None:
        if self._tag == "style":
            self.addresses += _IN_STYLE.findall(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        given = {name: value or "" for name, value in attrs}
        self.addresses += _IN_STYLE.findall(given.get("style", ""))
        if tag == "link" and set(given.get("rel", "").split()) <= _NOT_LOADED:
            return
        for name in _LOADED.get(tag, ()):
            parts = given.get(name, "").split(",") if name == "srcset" else [given.get(name, "")]
            self.addresses += [part.strip() for part in parts if _ADDRESS.match(part)]


def loads(text: str, kind: str) -> list[str]:
    """Addresses elsewhere that a file loads. kind: its ending, such as ".html"."""
    if kind == ".css":
        return _IN_STYLE.findall(text)
    page = _Loads()
    page.feed(text)
    return page.addresses


def check(site: Path) -> Iterator[str]:
    """A line for each address."""
    for file in sorted(site.rglob("*")):
        if file.suffix in (".css", ".html", ".svg"):
            for address in loads(file.read_text("utf-8"), file.suffix):
                yield f"{file.relative_to(site)} loads {address}"


def main() -> int:
    site = Path(sys.argv[1])
    if not (site / "index.html").exists():
        print(f"{site}: there is no built site; run `make site`", file=sys.stderr)
        return 1
    complaints = list(check(site))
    print("\n".join(complaints) or f"{site}: nothing is loaded from elsewhere")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
