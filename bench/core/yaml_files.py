"""Files that describe something in YAML, looked at before anything is made of them: small, flat, and plain values."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.core.errors import UsageError
from bench.core.units import MIB

MAX_FILE_BYTES = MIB
MAX_VALUES = 20_000
"""With every alias written out."""
MAX_NESTING_DEPTH = 24
MAX_VALUE_LENGTH = 3000
"""Characters of one value: an integer of more could not be written as text, in whatever base it was given."""

PACKAGE_DIRECTIVE = re.compile(r"\s*#\s*@package\b")


@functools.cache
def read_plain_yaml(field: str, path: Path) -> dict[str, Any]:
    """The fields of a file and their values, interpolations unresolved. Each file is read once: never change them.

    Parameters
    ----------
    field: str
        What is set to the file, for the sentence: ``hardware``.

    Raises
    ------
    UsageError
        If there is no such file, or it holds anything else than a description.
    """
    try:
        if not path.is_file():
            raise _invalid_file_error(field, path, f"a file that exists and ends in {path.suffix}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _invalid_file_error(field, path, f"a file of at most {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        if PACKAGE_DIRECTIVE.match(text):
            raise _invalid_file_error(field, path, "a file without # @package: its fields are those of its folder")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise _invalid_file_error(field, path, "a file that holds fields and their values, as those beside it do")
        if _count_values(node, {}, 0) > MAX_VALUES:
            raise _invalid_file_error(field, path, f"a file of at most {MAX_VALUES} values, aliases written out")
        values = OmegaConf.to_container(OmegaConf.load(path))
        json.dumps(values)
    except UsageError:
        raise
    except RecursionError:
        raise _invalid_file_error(
            field, path, f"a file whose values are nested at most {MAX_NESTING_DEPTH} deep"
        ) from None
    except TypeError:  # YAML has tags for bytes and more
        raise _invalid_file_error(field, path, "a file whose values are text, numbers, true, false or null") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise _invalid_file_error(field, path, f"a file that holds a description in YAML ({reason})") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _invalid_file_error(field: str, path: Path, expected: str) -> UsageError:
    return UsageError(f"{field}={path} is not valid: choose {expected}.")


def _count_values(node: yaml.Node, counted_nodes: dict[int, int], depth: int) -> int:
    """Values below a node, those below an alias as often as it is used.

    Raises
    ------
    RecursionError
        If they are too deep, as those of a node that holds itself are.
    ValueError
        If one is too long.
    """
    if depth > MAX_NESTING_DEPTH:
        raise RecursionError
    if id(node) not in counted_nodes:
        child_nodes: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            child_nodes = [node_part for pair in node.value for node_part in pair]
        elif isinstance(node, yaml.SequenceNode):
            child_nodes = node.value
        elif len(node.value) > MAX_VALUE_LENGTH:
            raise ValueError(f"a value has more than {MAX_VALUE_LENGTH} characters")
        counted_nodes[id(node)] = 1 + sum(
            _count_values(child_node, counted_nodes, depth + 1) for child_node in child_nodes
        )
    return counted_nodes[id(node)]
