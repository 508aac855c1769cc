"""``python -m bench.predict device NAME``: describe a device of one's own by a few numbers, the rest derived."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from bench.core.command_line import build_parser, require_path
from bench.core.errors import UsageError, invalid_value_error
from bench.core.files import write_temporary_file
from bench.core.option_files import OWN_CONF_VARIABLE, list_options
from bench.core.typed_config import Within, build_dataclass
from bench.hardware.derived import derive_hardware_values, describe_assumed_share
from bench.hardware.description import PEAK_BOUNDS, Hardware
from bench.hardware.hardware_file import (
    GROUP,
    UNDESCRIBED_OPTIONS,
    YAML_SUFFIX,
    format_hardware_yaml,
    read_base_values,
)
from bench.hardware.speeds import BANDWIDTH_BOUNDS

EPILOG = """\
examples:
  python -m bench.predict device mine memory_gb=96 bf16_tflops=400 bandwidth=2400
  python -m bench.predict device mine memory_gb=96 bf16_tflops=400 bandwidth=2400 power_w=450 like=h100_80gb --print

fields: memory_gb (GB), bf16_tflops and bandwidth (GB/s) are needed; fp32_tflops, tf32_tflops, fp16_tflops, fp8_tflops,
power_w (W) and multiprocessors are derived where they are not given. Peaks are dense. All else is that of the device it
is like, by default the one whose peak and bandwidth are nearest. network= changes links.

The file is hardware/NAME.yaml, in the folder of one's own that BENCH_CONF names or else in the current one; none is
overwritten. hardware=FILE takes it, and hardware=NAME where BENCH_CONF names its folder.
"""

NAME_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

FIELDS_PREFIX = "device"


@dataclass(frozen=True)
class DeviceNumbers:
    """What is said of a device."""

    memory_gb: Annotated[float, Within(1e-3, 1e6, unit="GB")]
    bf16_tflops: Annotated[float, PEAK_BOUNDS]
    bandwidth: Annotated[float, BANDWIDTH_BOUNDS]
    """Of its memory, in 10^9 bytes per second."""
    fp32_tflops: Annotated[float | None, PEAK_BOUNDS] = None
    tf32_tflops: Annotated[float | None, PEAK_BOUNDS] = None
    fp16_tflops: Annotated[float | None, PEAK_BOUNDS] = None
    fp8_tflops: Annotated[float | None, PEAK_BOUNDS] = None
    power_w: Annotated[float | None, Within(1e-3, 1e6, unit="W")] = None
    multiprocessors: Annotated[int | None, Within(1, 100_000)] = None
    like: str | None = None

    def to_hardware_values(self, name: str) -> dict[str, Any]:
        """The fields of a description that were given."""
        peaks = {
            field.name.removesuffix("_tflops"): getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name.endswith("_tflops") and getattr(self, field.name) is not None
        }
        values: dict[str, Any] = {
            "name": name,
            "peak_tflops": peaks,
            "memory_gb": self.memory_gb,
            "memory_bandwidth_gb_s": self.bandwidth,
        }
        if self.power_w is not None:
            values["power_w"] = self.power_w
        if self.multiprocessors is not None:
            values["speeds"] = {"matmul": {"multiprocessors": self.multiprocessors}}
        return values


def main(arguments: Sequence[str]) -> int:
    """Write the description of a device, or print it; returns 0.

    Raises
    ------
    UsageError
        If a number is missing or wrong, or there is a device or a file of that name.
    """
    parser = build_parser("predict device", __doc__, EPILOG)
    parser.add_argument("name", metavar="NAME", help="of the description: letters, digits and _")
    parser.add_argument("numbers", nargs="*", metavar="key=value", help="for example memory_gb=96")
    parser.add_argument("--print", action="store_true", dest="prints", help="print it, and write nothing")
    options = parser.parse_intermixed_args(arguments)
    numbers = parse_device_numbers(options.numbers)
    hardware = derive_device(options.name, numbers)
    share = describe_assumed_share(hardware)
    text = format_hardware_yaml(hardware, f"{hardware.name}, described by a few numbers: {share}.")
    if options.prints:
        print(text, end="")
        return 0
    path = write_device_file(hardware.name, text)
    is_option = bool(os.environ.get(OWN_CONF_VARIABLE))
    print(f"{path}: {share}.\nUse it: hardware={hardware.name if is_option else path}")
    return 0


def parse_device_numbers(arguments: Sequence[str]) -> DeviceNumbers:
    """The numbers of a command line, each ``key=value``.

    Raises
    ------
    UsageError
        Naming the field, the value and what is valid.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator:
            raise UsageError(f"cannot read {argument!r}: write key=value, for example memory_gb=96.")
        value = yaml.safe_load(text) if re.fullmatch(r"[\w.+-]+", text) else text
        values[key] = float(text) if isinstance(value, str) and _is_number(text) else value
    numbers: DeviceNumbers = build_dataclass(FIELDS_PREFIX, DeviceNumbers, values)
    return numbers


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def derive_device(name: str, numbers: DeviceNumbers) -> Hardware:
    """The complete description of a device.

    Raises
    ------
    UsageError
        If the name is taken or is none, or there is no device that it could be like.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise invalid_value_error("NAME", name, "letters, digits and _, a letter first")
    if name in list_options(GROUP):
        raise invalid_value_error("NAME", name, "a name that no description has yet")
    base_name = numbers.like or find_nearest_device(numbers)
    values = derive_hardware_values(numbers.to_hardware_values(name), read_base_values(base_name), base_name)
    hardware: Hardware = build_dataclass(GROUP, Hardware, values)
    return hardware


def find_nearest_device(numbers: DeviceNumbers) -> str:
    """The described device whose bf16 peak and bandwidth are nearest, both as ratios."""

    def compute_distance(values: dict[str, Any]) -> float:
        peak_ratio = numbers.bf16_tflops / values["peak_tflops"]["bf16"]
        bandwidth_ratio = numbers.bandwidth / values["memory_bandwidth_gb_s"]
        return math.hypot(math.log(peak_ratio), math.log(bandwidth_ratio))

    candidates = {
        option: read_base_values(option) for option in list_options(GROUP) if option not in UNDESCRIBED_OPTIONS
    }
    distances = {
        option: compute_distance(values)
        for option, values in candidates.items()
        if values.get("peak_tflops", {}).get("bf16") and values.get("speeds") and values.get("memory_bandwidth_gb_s")
    }
    return min(distances, key=distances.__getitem__)


def write_device_file(name: str, text: str) -> Path:
    """Write a description where its option is looked for, or here; returns its path.

    Raises
    ------
    UsageError
        If there is such a file, or its folder cannot be written to.
    """
    path = require_path("NAME", str(Path(os.environ.get(OWN_CONF_VARIABLE) or ".") / GROUP / f"{name}{YAML_SUFFIX}"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = write_temporary_file(path.parent, text)
        try:
            os.link(temporary_path, path)  # which fails where there is a file
        finally:
            temporary_path.unlink()
    except FileExistsError:
        raise invalid_value_error("NAME", name, f"another one, since {path} exists: none is overwritten") from None
    except OSError as error:
        raise invalid_value_error("NAME", name, f"a name that {path} can be written for ({error.strerror})") from None
    return path
