"""Every Python process that finds this folder in PYTHONPATH has the fake CUDA as soon as it imports torch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence


class TorchImportHook(importlib.abc.MetaPathFinder):
    """Finds torch where it is, and has something done when its import is over."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute_module = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute_module(module)
            from tests.fakecuda import installed

            installed.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, TorchImportHook())
