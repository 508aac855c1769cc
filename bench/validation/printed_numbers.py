"""Numbers as people print them: ``8x``, ``1k``, ``1,024``, ``12.3 GiB``, ``45 %``."""

from __future__ import annotations

import math
import re

from bench.core.units import GIB, MIB

MEMORY_UNITS = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kb": 10**3,
    "kib": 2**10,
    "mb": 10**6,
    "mib": MIB,
    "m": MIB,
    "gb": 10**9,
    "gib": GIB,
    "g": 10**9,
    "tb": 10**12,
    "tib": 2**40,
}
"""Bytes of a unit as printed, in lower case. A bare M is MiB, as nvidia-smi prints memory."""

TIME_UNITS = {
    **dict.fromkeys(("us", "µs", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "millisecond", "milliseconds", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds", "s/it", "s/iter", "s/step"), 1.0),
    **dict.fromkeys(("min", "mins", "minutes"), 60.0),
    **dict.fromkeys(("h", "hours"), 3600.0),
}
"""Seconds of a unit as printed, in lower case."""

DECIMAL_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
BINARY_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20}

NO_NUMBER_WORDS = ("", "-", "--", "—", "–", "n/a", "na", "nan", "none", "null", "?", "tbd", "unknown", "not stated")
"""How tables write that there is no number."""

NUMBER_PATTERN = r"[-+]?(?:\d+(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+"


class NoNumberError(ValueError):
    """A cell that holds no single number, and says so: blank, a bound or a range; or a number in a unit that is none of
    those that are known."""


def is_blank(text: str) -> bool:
    """Whether a cell says nothing."""
    return text.strip().lower() in NO_NUMBER_WORDS


def split_number(text: str) -> tuple[float, str]:
    """A number and the unit that is printed after it, in lower case.

    Raises
    ------
    NoNumberError
        If the cell says that there is none, or holds a bound or a range.
    ValueError
        If it cannot be read.
    """
    text = text.strip()
    if is_blank(text):
        raise NoNumberError("nothing is stated")
    if re.match(r"^[<>≥≤]", text) or text.endswith("+"):
        raise NoNumberError(f"{text} is a bound")
    if re.fullmatch(rf"[~≈]?\s*({NUMBER_PATTERN})\s*(?:-|–|—|\.\.+|to|/|\|)\s*({NUMBER_PATTERN}).*", text):
        raise NoNumberError(f"{text} is a range")
    match = re.fullmatch(rf"[~≈x×]?\s*({NUMBER_PATTERN})\s*(?:±.*)?\s*([^\d±]*)", text)
    if match is None:
        raise ValueError(f"{text} is not a number")
    number = float(match[1].replace(",", ""))
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number, match[2].strip().lower()


def parse_count(text: str) -> int:
    """A whole number of GPUs, tokens or sequences: 8, 8x, 8 GPUs, 1k (1024), 2.0.

    Raises
    ------
    NoNumberError, ValueError
        As `split_number`; a number that is not whole, or below 1, is a ValueError.
    """
    number, unit = split_number(text)
    number *= BINARY_SUFFIXES.get(_find_suffix(unit), 1)
    if number != round(number) or number < 1:
        raise ValueError(f"{text.strip()} is not a whole number of at least 1")
    return round(number)


def _find_suffix(unit: str) -> str:
    """The k or m that a unit begins with, unless that is the beginning of a word."""
    match = re.match(r"[km](?![a-z])", unit)
    return match[0] if match else ""


def parse_parameters(text: str) -> float | None:
    """A number of parameters (7B, 1.3 billion, 350M, 6658859008), None where there is none."""
    try:
        number, unit = split_number(text)
    except ValueError:
        return None
    return number * DECIMAL_SUFFIXES.get(unit[:1], 1.0)


def find_rounding(text: str) -> float:
    """Half of the last digit that a number of parameters is printed with: 0.5e9 of 7B, 5e7 of 1.3B; 0 of no number."""
    match = re.search(r"\d[\d,]*(?:\.(\d+))?", text)
    scale = parse_parameters(re.sub(NUMBER_PATTERN, "1", text, count=1)) if match else None
    return 0.0 if match is None or scale is None else scale * 0.5 * 10.0 ** -len(match[1] or "")


def parse_bytes(text: str, unit: str) -> float:
    """A size in bytes; the unit printed with the number wins over that of the column.

    Raises
    ------
    NoNumberError, ValueError
        As `split_number`; the former also if the unit is no size.
    """
    number, own_unit = split_number(text)
    word = re.split(r"[\s/,(]", (own_unit or unit).strip().lower())[0] or "gb"
    if word not in MEMORY_UNITS:
        raise NoNumberError(f"{own_unit or unit} is no unit of memory")
    return number * MEMORY_UNITS[word]


def parse_seconds(text: str, unit: str) -> float:
    """A time in seconds, units as in `parse_bytes`.

    Raises
    ------
    NoNumberError, ValueError
        As `split_number`; the former also if the unit is no time.
    """
    number, own_unit = split_number(text)
    word = re.split(r"[\s,(]", (own_unit or unit).strip().lower())[0]
    if word not in TIME_UNITS:
        raise NoNumberError(f"{own_unit or unit} is no unit of time")
    return number * TIME_UNITS[word]


def parse_rate(text: str, unit: str) -> float:
    """A number per second, K and M as thousands and millions: 29K tokens/s, 29 thousand tokens/s."""
    number, own_unit = split_number(text)
    suffix = _find_suffix(own_unit)
    if not suffix and re.match(r"k ?tok|thousand|k/s|k$", unit.strip().lower()):
        suffix = "k"
    if not suffix and re.match(r"million", unit.strip().lower()):
        suffix = "m"
    return number * DECIMAL_SUFFIXES[suffix]


def parse_percent(text: str, unit: str) -> float:
    """A share: 45 %, or 0.45 where no percent sign is printed with it or stands in the unit."""
    number, own_unit = split_number(text)
    return number / 100 if "%" in own_unit or "%" in unit or number > 1 else number
