"""Every link of the built site leads to a file of it, and to a place in that file that exists.

    python docs/site/check_links.py build/site        # prints what leads nowhere; exit status 1 when something does

Links to other sites are not followed: a build does not depend on them.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

IGNORED = ("genindex.html", "search.html")  # what the theme makes without being asked


class Page(HTMLParser):
    """The links of a page, and the places in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value and tag != "link":
                self.links.add(value)
            elif name == "id" and value:
                self.places.add(value)


def broken_links(site: Path) -> list[str]:
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        if path.name in IGNORED:
            continue
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            is_there = target.is_file() and (not place or target not in pages or place in pages[target].places)
            if not is_there:
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


if __name__ == "__main__":
    found = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "every link of the site leads somewhere")
    sys.exit(1 if found else 0)
