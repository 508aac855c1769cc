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

from bench.errors import UsageError

MOST_BYTES = 2**20
MOST_VALUES = 20_000
"""With every alias written out."""
DEEPEST = 24
LONGEST = 3000
"""Characters of one value: an integer of more could not be written as text, in whatever base it was given."""

PACKAGE = re.compile(r"\s*#\s*@package\b")


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
            raise _unusable(field, path, f"a file that exists and ends in {path.suffix}")
        if path.stat().st_size > MOST_BYTES:
            raise _unusable(field, path, f"a file of at most {MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        if PACKAGE.match(text):
            raise _unusable(field, path, "a file without # @package: its fields are those of its folder")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise _unusable(field, path, "a file that holds fields and their values, as those beside it do")
        if _size(node, {}, 0) > MOST_VALUES:
            raise _unusable(field, path, f"a file of at most {MOST_VALUES} values, aliases written out")
        values = OmegaConf.to_container(OmegaConf.load(path))
        json.dumps(values)
    except UsageError:
        raise
    except RecursionError:
        raise _unusable(field, path, f"a file whose values are nested at most {DEEPEST} deep") from None
    except TypeError:  # YAML has tags for bytes and more
        raise _unusable(field, path, "a file whose values are text, numbers, true, false or null") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise _unusable(field, path, f"a file that holds a description in YAML ({reason})") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _unusable(field: str, path: Path, valid: str) -> UsageError:
    return UsageError(f"{field}={path} is not valid: choose {valid}.")


def _size(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Values below a node, those below an alias as often as it is used.

    Raises
    ------
    RecursionError
        If they are too deep, as those of a node that holds itself are.
    ValueError
        If one is too long.
    """
    if depth > DEEPEST:
        raise RecursionError
    if id(node) not in known:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif len(node.value) > LONGEST:
            raise ValueError(f"a value has more than {LONGEST} characters")
        known[id(node)] = 1 + sum(_size(part, known, depth + 1) for part in inner)
    return known[id(node)]
