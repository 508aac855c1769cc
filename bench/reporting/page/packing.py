"""Large parts of a page, compressed: a script of the page unpacks them where they are needed."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from typing import Any

GLYPH = re.compile(r'<path id="([^"]+)" (d="[^"]*" transform="scale[^"]*")/>\s*')
"""The outline of a character in an SVG of matplotlib, which every figure has anew."""


def compress_text(text: str) -> str:
    """A text as gzip in base64, the same every time: letters and digits that may stand anywhere in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def compress_json(value: Any) -> str:
    """A plain value as JSON in `compress_text`."""
    return compress_text(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def pack_figures(svg_texts: Mapping[str, str]) -> str:
    """SVG figures by name in `compress_text`: ``figures``, and apart from them ``glyphs`` by id, the outlines of
    characters, of which every figure names those that it has in place of its first definitions."""
    glyphs: dict[str, str] = {}
    figures = {}
    for name, text in svg_texts.items():
        own_glyphs = dict(GLYPH.findall(text))
        if any(glyphs.get(glyph, outline) != outline for glyph, outline in own_glyphs.items()):
            own_glyphs = {}  # of another font
        else:
            glyphs |= own_glyphs
            text = GLYPH.sub("", text)
        figures[name] = [text, list(own_glyphs)]
    return compress_json({"glyphs": glyphs, "figures": figures})
