"""Where the suite lies: a checkout, or a wheel that has its configuration, rows and notebooks inside the package."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

DISTRIBUTION = "fsdp-bench"

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

IS_CHECKOUT = (PACKAGE_FOLDER.parent / "conf" / "config.yaml").is_file()
"""Or a copy of one, which jobs run in."""

DATA_FOLDER = PACKAGE_FOLDER.parent if IS_CHECKOUT else PACKAGE_FOLDER
"""Holds ``conf``, ``results`` and ``analysis``."""


def read_torch_version() -> dict[str, Any]:
    """What ``torch.version`` says (``__version__``, ``cuda``, ``hip``), of a torch that need not be imported for it: it
    would take a second and 200 MB."""
    return vars(sys.modules["torch"].version) if "torch" in sys.modules else _read_version_file()


@functools.cache
def _read_version_file() -> dict[str, Any]:
    package = importlib.util.find_spec("torch")
    assert package is not None
    return runpy.run_path(str(Path(str(package.origin)).with_name("version.py")))


def format_install_command(*extras: str, options: str = "") -> str:
    """What to type for some of the optional extras, from where the suite was installed."""
    extras_text = ",".join(extras)
    if IS_CHECKOUT:
        path = "." if Path.cwd() == DATA_FOLDER else str(DATA_FOLDER)
        return f'pip install {options}-e "{path}[{extras_text}]"'
    installed_path = _find_installed_path()
    if installed_path is not None:
        return f'pip install {options}"{installed_path}[{extras_text}]"'
    return f"pip install {options}" + " ".join(f'"{text}"' for extra in extras for text in _list_requirements(extra))


def _find_installed_path() -> str | None:
    """The folder or wheel that pip installed, as it wrote down."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = urlparse(json.loads(text or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else None


def _list_requirements(extra: str) -> list[str]:
    """What an extra requires, as ``peft>=0.21``."""
    requirements = [text.partition(";") for text in importlib.metadata.requires(DISTRIBUTION) or []]
    return [name.strip() for name, _, marker in requirements if f'extra == "{extra}"' in marker.replace("'", '"')]
