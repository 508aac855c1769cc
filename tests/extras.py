"""Tests that need an optional extra of the package."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test where one of its packages is missing; with ``REQUIRE_EXTRAS=1`` it runs all the same, and fails."""
    return pytest.mark.needs(*packages)


def skip_tests_missing_extras(items: list[pytest.Item]) -> None:
    """Have collected tests skipped that need a package which is not installed."""
    if os.environ.get("REQUIRE_EXTRAS") == "1":
        return
    for item in items:
        packages = [package for mark in item.iter_markers("needs") for package in mark.args]
        missing = [package for package in dict.fromkeys(packages) if importlib.util.find_spec(package) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
