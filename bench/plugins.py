"""Find the one class of a plug-in file by the file's name: the mechanism behind "one new file, nothing else"."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from bench.errors import bad_value


def names(package: ModuleType, base: Any) -> list[str]:
    """Names of the files of `package` that define a class derived from `base`, sorted."""
    found = [info.name for info in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in found if _classes(importlib.import_module(f"{package.__name__}.{name}"), base))


def find(field: str, name: str, package: ModuleType, base: Any) -> Any:
    """The class derived from `base` that ``package/name.py`` defines.

    A `name` with a dot is the path of a module outside the package: somebody's own plug-in.

    Raises
    ------
    UsageError
        If there is no such file or module, or it does not define exactly one such class.
    """
    path = name.lstrip(".") if "." in name else f"{package.__name__}.{name}"
    try:
        if not all(part.isidentifier() for part in path.split(".")):
            raise ModuleNotFoundError(name=path)
        module = importlib.import_module(path)
    except Exception as error:  # whatever somebody's own module raises
        if not isinstance(error, ModuleNotFoundError) or error.name is None or not path.startswith(error.name):
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
            raise bad_value(field, name, f"a module that can be imported ({reason})") from error
        raise bad_value(field, name, [*names(package, base), "or a module path of your own"]) from None
    classes = _classes(module, base)
    if len(classes) != 1:
        raise bad_value(field, name, f"a module that defines one subclass of {base.__name__}, not {len(classes)}")
    return classes[0]


def _classes(module: ModuleType, base: Any) -> list[Any]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    ]
