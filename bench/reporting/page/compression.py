"""Large parts of a page, compressed: a script of the page unpacks them where they are needed."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any


def compress_text(text: str) -> str:
    """A text as gzip in base64, the same every time: letters and digits that may stand anywhere in HTML."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def compress_json(value: Any) -> str:
    """A plain value as JSON in `compress_text`."""
    return compress_text(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
