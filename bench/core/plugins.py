"""Find the one class of a plug-in file by the file's name: the mechanism behind "one new file, nothing else".

A plug-in is a file of the suite's own package, a module that an installed package names as an entry point, or a module
whose path the user types. An installed package brings its YAML in a folder ``conf`` with groups as in the suite's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.core.errors import UsageError, invalid_value_error

ENTRY_POINT_GROUPS = {
    "bench.strategies": "fsdp_bench.strategies",
    "bench.models": "fsdp_bench.families",
    "bench.tracking": "fsdp_bench.trackers",
}
"""Groups of entry points in which installed packages name further modules of the suite's packages."""


@functools.cache
def list_entry_points(package_name: str) -> dict[str, str]:
    """Module paths that installed packages offer beside those of a package of the suite, by name."""
    if package_name not in ENTRY_POINT_GROUPS:
        return {}
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUPS[package_name])
    return {entry_point.name: entry_point.module for entry_point in sorted(entry_points, key=lambda point: point.value)}


def find_source_file(module_path: str) -> Path | None:
    """The file of a module, found without importing anything; None where there is none."""
    package_name, *inner_names = module_path.split(".")
    try:
        spec = importlib.util.find_spec(package_name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner_names:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *inner_names)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@functools.cache
def list_installed_conf_folders() -> tuple[Path, ...]:
    """Folders ``conf`` of the packages that have entry points, found without importing them."""
    package_names = {
        module_path.partition(".")[0]
        for package_name in ENTRY_POINT_GROUPS
        for module_path in list_entry_points(package_name).values()
    }
    package_files = [find_source_file(package_name) for package_name in sorted(package_names)]
    folders = [file.parent / "conf" for file in package_files if file is not None and file.name == "__init__.py"]
    return tuple(folder for folder in folders if folder.is_dir())


def list_plugin_names(package: ModuleType, base_class: Any) -> list[str]:
    """Names of the files of `package` that define a class derived from `base_class`, and of installed ones, sorted.

    An installed module that cannot be imported is left out.
    """
    own_names = [
        info.name
        for info in pkgutil.iter_modules(package.__path__)
        if _list_subclasses(_import_plugin(f"{package.__name__}.{info.name}", base_class), base_class)
    ]
    installed_names = [
        name
        for name, module_path in list_entry_points(package.__name__).items()
        if _defines_subclass(module_path, base_class)
    ]
    return sorted({*own_names, *installed_names})


def find_plugin_class(field: str, name: str, package: ModuleType, base_class: Any) -> Any:
    """The class derived from `base_class` that ``package/name.py`` defines, or ``package/name/strategy.py`` for a
    `Strategy`; else that of the installed module which has this name among the entry points.

    A `name` with a dot is the path of a module outside the package: somebody's own plug-in.

    Raises
    ------
    UsageError
        If there is no such file or module, or it does not define exactly one such class.
    """
    path = find_module_path(name, package)
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


def find_own_plugin_class(field: str, name: str, package: ModuleType, base_class: Any) -> Any:
    """The same, where nobody's own module will do.

    Raises
    ------
    UsageError
        If no file of the package, and no entry point, has this name.
    """
    if "." not in name:
        with contextlib.suppress(UsageError):
            return find_plugin_class(field, name, package, base_class)
    raise invalid_value_error(field, name, list_plugin_names(package, base_class))


def find_module_path(name: str, package: ModuleType) -> str:
    """The path of the module that a name stands for, whether or not there is one."""
    if "." in name:
        return name.lstrip(".")
    own_path = f"{package.__name__}.{name}"
    installed_path = list_entry_points(package.__name__).get(name, own_path)
    has_own_module = own_path in sys.modules or (installed_path != own_path and importlib.util.find_spec(own_path))
    return own_path if has_own_module else installed_path


def _defines_subclass(module_path: str, base_class: Any) -> bool:
    try:
        return bool(_list_subclasses(_import_plugin(module_path, base_class), base_class))
    except Exception:  # whatever somebody's own module raises
        return False


def _import_plugin(path: str, base_class: Any) -> ModuleType:
    """A module, or of a package its module of the base class's name, in lower case."""
    module = importlib.import_module(path)
    if not hasattr(module, "__path__"):
        return module
    module_name = f"{path}.{base_class.__name__.lower()}"
    if module_name in sys.modules:  # looking for its file takes far longer
        return sys.modules[module_name]
    return importlib.import_module(module_name) if importlib.util.find_spec(module_name) else module


@functools.cache
def _list_subclasses(module: ModuleType, base_class: Any) -> list[Any]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, base_class)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    ]
