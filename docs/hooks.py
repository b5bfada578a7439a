"""MkDocs hooks: pages from the repository root, and links that work both on GitHub and on the site."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files outside docs/ that become pages: path in the repository -> path on the site."""

_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Write heading anchors as GitHub does, and link the repository in the footer."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": SOURCE, "name": "Source on GitHub"}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point relative links at the site's pages, or at GitHub for files that the site does not have."""
    here = page.file.src_uri
    source = next((source for source, uri in PAGES.items() if uri == here), f"docs/{here}")

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        anchor = match[2] or ""
        if target in PAGES or target.startswith("docs/"):
            uri = PAGES.get(target, target.removeprefix("docs/"))
            return f"]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"
        if (ROOT / target).exists():
            return f"]({SOURCE}/blob/main/{target}{anchor})"
        return match[0]  # broken: strict mode reports it

    return _LINK.sub(rewrite, markdown)
