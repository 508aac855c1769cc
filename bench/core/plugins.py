"""Find the one class of a plug-in file by the file's name: the mechanism behind "one new file, nothing else"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from bench.core.errors import invalid_value_error


def list_plugin_names(package: ModuleType, base_class: Any) -> list[str]:
    """Names of the files of `package` that define a class derived from `base_class`, sorted."""
    module_names = [info.name for info in pkgutil.iter_modules(package.__path__)]
    return sorted(
        name
        for name in module_names
        if _list_subclasses(_import_plugin(f"{package.__name__}.{name}", base_class), base_class)
    )


def find_plugin_class(field: str, name: str, package: ModuleType, base_class: Any) -> Any:
    """The class derived from `base_class` that ``package/name.py`` defines, or ``package/name/strategy.py`` for a
    `Strategy`.

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
        module = _import_plugin(path, base_class)
    except Exception as error:  # whatever somebody's own module raises
        if not isinstance(error, ModuleNotFoundError) or error.name is None or not path.startswith(error.name):
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
            raise invalid_value_error(field, name, f"a module that can be imported ({reason})") from error
        raise invalid_value_error(
            field, name, [*list_plugin_names(package, base_class), "or a module path of your own"]
        ) from None
    classes = _list_subclasses(module, base_class)
    if len(classes) != 1:
        raise invalid_value_error(
            field, name, f"a module that defines one subclass of {base_class.__name__}, not {len(classes)}"
        )
    return classes[0]


def _import_plugin(path: str, base_class: Any) -> ModuleType:
    """A module, or of a package its module of the base class's name, in lower case."""
    module = importlib.import_module(path)
    if not hasattr(module, "__path__"):
        return module
    module_name = f"{path}.{base_class.__name__.lower()}"
    return importlib.import_module(module_name) if importlib.util.find_spec(module_name) else module


def _list_subclasses(module: ModuleType, base_class: Any) -> list[Any]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base_class)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    ]
