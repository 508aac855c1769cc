"""Tests that need an optional extra of the package."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where one of its packages is missing; with ``REQUIRE_EXTRAS=1`` it runs all the same, and fails."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing) and os.environ.get("REQUIRE_EXTRAS") != "1", reason=f"not installed: {', '.join(missing)}"
    )
