"""Hooks of MkDocs: pages and files of the site that lie outside of docs/.

README.md, CHANGELOG.md, CONTRIBUTING.md and bench/README.md become pages. Other files that pages
link to, such as examples and results, are copied to files/. Links are rewritten to fit; MkDocs
checks them all, in strict mode.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "running_benchmarks.md",
}
"""Pages of the site by their place in the repository."""

_LINK = re.compile(r"(?P<text>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def place_of(name: str) -> str:
    """Place in the site of a file of the repository."""
    if name in PAGES:
        return PAGES[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"


def linked(text: str, source: str) -> dict[str, str]:
    """Links of a page to other files: as written, and the file in the repository.

    Args:
        text: the page.
        source: its place in the repository.
    """
    targets = {match["target"] for match in _LINK.finditer(text) if not re.match(r"\w+:", match["target"])}
    folder = os.path.dirname(source)
    return {target: os.path.normpath(os.path.join(folder, target)) for target in targets}


def rewritten(text: str, source: str) -> str:
    """The page with links that fit the site. All pages lie in its root."""
    names = linked(text, source)

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        place = place_of(names[target]) if target in names else target
        return f"{match['text']}{place}{match['anchor'] or ''})"

    return _LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside, and what any page links to outside."""
    texts = {f"docs/{file.src_uri}": (ROOT / "docs" / file.src_uri).read_text() for file in files.documentation_pages()}
    for source in PAGES:
        texts[source] = (ROOT / source).read_text()
        files.append(File.generated(config, PAGES[source], content=rewritten(texts[source], source)))
    names = {name for source, text in texts.items() for name in linked(text, source).values()}
    for name in sorted(names - PAGES.keys()):
        if not name.startswith("docs/") and (ROOT / name).is_file():
            files.append(File.generated(config, place_of(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites the links of pages in docs/."""
    return markdown if page.file.generated_by else rewritten(markdown, f"docs/{page.file.src_uri}")
