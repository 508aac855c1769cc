"""The user's mistakes: one sentence that names the field, the value and the valid choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_SHOWN_LENGTH = 200
"""Characters of a value that are repeated in a sentence."""


def escape_unprintable(text: str) -> str:
    """Text in one line that a terminal shows as it is: control characters and lone surrogates as their escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class UsageError(ValueError):
    """Something the user typed cannot be done; commands print it alone and exit with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(escape_unprintable(message))


class ImpossibleError(UsageError):
    """Settings that are valid each but cannot go together, or not on this machine: a sweep leaves such a run out."""


def suggest_nearest(value: object, choices: Iterable[object]) -> str:
    """`` (did you mean t5_small?)`` for the choice that is spelled most like a value; empty where none is alike.

    A choice with dots is also compared by its last part: ``sharding_factor`` is near ``strategy.sharding_factor``.
    """
    texts = dict.fromkeys(str(choice) for choice in choices)
    by_last_part: dict[str, str] = {}
    for text in texts:
        by_last_part.setdefault(text.rpartition(".")[2].casefold(), text)
        by_last_part.setdefault(text.casefold(), text)
    typed = shorten_text(str(value)).casefold()
    nearest = difflib.get_close_matches(typed, by_last_part)
    if not nearest and "." in typed:
        nearest = difflib.get_close_matches(typed.rpartition(".")[2], by_last_part)
    nearest.sort(key=lambda choice: sorted(choice) != sorted(typed))  # letters in another order come first
    return f" (did you mean {by_last_part[nearest[0]]}?)" if nearest else ""


def invalid_value_error(
    field: str,
    value: object,
    choices: Iterable[object] | str,
    error_class: type[UsageError] = UsageError,
    names: Iterable[object] = (),
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
    error_class: type
        `ImpossibleError` where the value is valid elsewhere.
    names: iterable
        The valid values that are names, where `choices` is a sentence part: the nearest is suggested.
    """
    if isinstance(choices, str):
        valid_values = choices
    else:
        names = [str(choice) for choice in choices]
        valid_values = ", ".join(map(str, names))
    suggestion = suggest_nearest(value, names) if isinstance(value, str) else ""
    return error_class(f"{shorten_text(field)}={_format_value(value)} is not valid: choose {valid_values}{suggestion}.")


def unknown_field_error(
    key: str, names: Iterable[str], of: str = "", error_class: type[UsageError] = UsageError, nested: Iterable[str] = ()
) -> UsageError:
    """A `UsageError` for a field that there is not, with the nearest that there is.

    Parameters
    ----------
    of: str
        What does not have the field: `` of strategy=ddp``.
    nested: iterable of str
        Fields of sections, which are suggested and not listed.
    """
    names = list(names)
    suggestion = suggest_nearest(key, names) or suggest_nearest(key, nested)
    return error_class(f"{key} is not a field{of}: choose {', '.join(names)}{suggestion}.")


def _format_value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return shorten_text(str(value))
    except ValueError:  # more digits than Python writes
        return "a number of more than 4300 digits"


def shorten_text(text: str) -> str:
    """Text that may be a whole file, for a sentence."""
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}… ({len(text)} characters)"


def require_choice(field: str, value: object, choices: Iterable[object]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise invalid_value_error(field, value, choices)


def require_at_least(field: str, value: float, minimum: float, *, is_whole: bool = True) -> None:
    """Raise `UsageError` unless ``value >= minimum``."""
    if value < minimum:
        raise invalid_value_error(field, value, f"{'a whole number' if is_whole else 'a number'} of at least {minimum}")
