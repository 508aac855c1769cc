"""The user's mistakes: one sentence that names the field, the value and the valid choices."""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(ValueError):
    """Something the user typed cannot be done; commands print it alone and exit with code 2."""


class ImpossibleError(UsageError):
    """Settings that are valid each but cannot go together, or not on this machine: a sweep leaves such a run out."""


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
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return kind(f"{field}={shown} is not valid: choose {valid}.")


def require_choice(field: str, value: object, choices: Iterable[object]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise bad_value(field, value, choices)


def require_at_least(field: str, value: float, minimum: float, *, whole: bool = True) -> None:
    """Raise `UsageError` unless ``value >= minimum``."""
    if value < minimum:
        raise bad_value(field, value, f"{'a whole number' if whole else 'a number'} of at least {minimum}")
