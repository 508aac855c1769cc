"""Sphinx's configuration of the site: what is shown is written in ``docs/``, drawn from rows or printed by commands."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

project = "fsdp-bench"
author = "fsdp-bench contributors"
project_copyright = author
html_title = "fsdp-bench"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "page_commands",
    "report_figures",
    "generated_pages",
    "claim_pages",
    "notebook_pages",
]
exclude_patterns = ["_ext", "_static"]
default_role = "code"  # docstrings write `name`
nitpicky = False  # links between pages are checked by MyST; types in signatures are torch's and pandas's
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
suppress_warnings: list[str] = []

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "alphabetical"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"
