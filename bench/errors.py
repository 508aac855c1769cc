"""The user's mistakes: one sentence that names the field, the value and the valid choices."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_VALUE = 200
"""Characters of a value that are repeated in a sentence."""


def printable(text: str) -> str:
    """Text in one line that a terminal shows as it is: control characters and lone surrogates as their escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class UsageError(ValueError):
    """Something the user typed cannot be done; commands print it alone and exit with code 2."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


class ImpossibleError(UsageError):
    """Settings that are valid each but cannot go together, or not on this machine: a sweep leaves such a run out."""


def how_to_install(*extras: str, options: str = "") -> str:
    """What to type, in the folder of this project, for some of its optional extras."""
    return f'pip install {options}-e ".[{",".join(extras)}]"'


def bad_value(
    field: str, value: object, choices: Iterable[object] | str, kind: type[UsageError] = UsageError
) -> UsageError:
    """A `UsageError` for `field=value`, saying what would have been valid.

    Parameters
    ----------
    field: str
        Name as the user types it, for example ``strategy.sharding_factor``.
    value: object
        What was given.
    choices: iterable or str
        The valid values, or a sentence part that describes them ("a whole number of at least 1").
    kind: type
        `ImpossibleError` where the value is valid elsewhere.
    """
    valid = choices if isinstance(choices, str) else ", ".join(str(choice) for choice in choices)
    return kind(f"{shortened(field)}={_shown(value)} is not valid: choose {valid}.")


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return shortened(str(value))
    except ValueError:  # more digits than Python writes
        return "a number of more than 4300 digits"


def shortened(text: str) -> str:
    """Text that may be a whole file, for a sentence."""
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}… ({len(text)} characters)"


def require_choice(field: str, value: object, choices: Iterable[object]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise bad_value(field, value, choices)


def require_at_least(field: str, value: float, minimum: float, *, whole: bool = True) -> None:
    """Raise `UsageError` unless ``value >= minimum``."""
    if value < minimum:
        raise bad_value(field, value, f"{'a whole number' if whole else 'a number'} of at least {minimum}")
