"""Every Python process that finds this folder in PYTHONPATH has the fake CUDA as soon as it imports torch, or the
suite."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


def install_fake_cuda() -> None:
    from tests.fakecuda import installed

    installed.install()


def import_torch() -> None:
    """What the suite reads from the files of torch, without importing it, says nothing of the fake CUDA."""
    import torch  # noqa: F401


ACTIONS: dict[str, Callable[[], None]] = {"torch": install_fake_cuda, "bench.core.processes": import_torch}


class ImportHook(importlib.abc.MetaPathFinder):
    """Finds modules where they are, and has something done when the import of one is over."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ACTIONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute_module = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute_module(module)
            ACTIONS[name]()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, ImportHook())
