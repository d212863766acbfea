"""Hooks of `mkdocs build`: what the site shows beside the pages of `docs/`, which stay readable on a forge.

The navigation is that of the tables in the README of each folder. The first page is the project's README. Where
`reference/api.md` has the summary and the example of a name, the site has its whole docstring.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File

import reshard
import reshard.mindspore

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
API = "reference/api.md"
_LINK = re.compile(r"(\[[^\]]*\]\()(?!https:|#)([^)\s#]+)")
_ROW = re.compile(r"\]\(([a-z0-9-]+\.md)\)")
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_NAME = re.compile(r"^### `reshard\.(mindspore\.)?(\w+)`\n.*?^```\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)


class Examples(griffe.Extension):
    """Shows the examples of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_config(config: MkDocsConfig) -> None:
    """Set the navigation: the pages of each folder in the order of its README."""
    folders = {"Guides": "guides", "Reference": "reference"}
    config.nav = [
        {"reshard": "index.md"},
        *({title: [f"{folder}/README.md", *listed(folder)]} for title, folder in folders.items()),
        {"Benchmarks": "benchmarks.md"},
        {"Limits": "limits.md"},
        {"For agents": "SKILL.md"},
    ]


def listed(folder: str) -> list[str]:
    """Return the pages that the README of a folder lists."""
    return [f"{folder}/{name}" for name in _ROW.findall((ROOT / "docs" / folder / "README.md").read_text())]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README as the first page."""
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files that the site lacks to the repository, and insert docstrings."""
    place = page.file.src_uri

    def absolute(match: re.Match[str]) -> str:
        path = normpath(join(dirname(place), match[2]))
        if files.get_file_from_path(path):
            return match[0]
        of_repository = normpath(join("docs", path)) if place != "index.md" else path
        return f"{match[1]}{config.repo_url}/blob/HEAD/{of_repository}"

    markdown = _LINK.sub(absolute, markdown)
    return _NAME.sub(docstring, markdown) if place == API else markdown


def docstring(match: re.Match[str]) -> str:
    """Return the directive for the docstring of a name, by the module that defines it."""
    module: Any = reshard.mindspore if match[1] else reshard
    value = getattr(module, match[2])
    return f"""::: {value.__module__}.{value.__qualname__}
    options:
      heading: "{module.__name__}.{match[2]}"
      toc_label: "{match[2]}"
"""
