"""The documentation site: ``make docs`` builds it with Sphinx, and a warning is an error."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tools import reference

import hearth
from hearth.wire.openapi import describe_platform

project = "Hearth"
author = "the authors of Hearth"
version = release = hearth.__version__
html_title = "Hearth"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_maximum_signature_line_length = 80

toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["hearth.css"]
html_favicon = "_static/mark.svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_logo": "mark.svg",
    "dark_logo": "mark.svg",
    "light_css_variables": {
        "color-brand-primary": "#b3400f",
        "color-brand-content": "#a33a0d",
        "color-sidebar-link-text": "var(--color-foreground-secondary)",
        "color-sidebar-link-text--top-level": "var(--color-foreground-primary)",
    },
    "dark_css_variables": {
        "color-brand-primary": "#ff9a5c",
        "color-brand-content": "#ffa66e",
        "color-sidebar-link-text": "var(--color-foreground-secondary)",
        "color-sidebar-link-text--top-level": "var(--color-foreground-primary)",
    },
}
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    """Fill the reference pages, link the pages that texts name, write the OpenAPI document."""
    app.connect("source-read", _complete_page)
    app.connect("include-read", _complete_included)
    app.connect("build-finished", _write_openapi)


def _complete_page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _link_pages(reference.fill(source[0]))


def _complete_included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    content[0] = _link_pages(content[0])


def _link_pages(text: str) -> str:
    """The text with ``docs/NAME.md`` as a link, code aside."""
    parts = re.split(r"(^ *```(?!{py:).*?^ *```|`[^`\n]+`)", text, flags=re.DOTALL | re.MULTILINE)
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"(?<![\w/])docs/(\w+\.md)", r"[\1](/\1)", parts[place])
    return "".join(parts)


def _write_openapi(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        text = json.dumps(describe_platform(version), indent=1)
        (Path(app.outdir) / "reference" / "openapi.json").write_text(text)
