"""``python -m bench.calibration.fit_published``: fit the kernel curves of conf/hardware to published microbenchmarks.

Without arguments every device is fitted and its file compared; ``--write`` writes the numbers, and
docs/results/kernels.md with how well they fit. Names of devices limit what is compared or written, not what is fitted:
devices without points take the median of others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.calibration.published.device_fit import DeviceFit
from bench.calibration.published.devices import find_architecture
from bench.calibration.published.fitting import fit_devices
from bench.calibration.published.page import PAGE_PATH, build_page
from bench.calibration.published.yaml_text import set_values
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.core.command_line import build_parser, report_usage_errors, run_main
from bench.core.errors import require_choice
from bench.core.installation import DATA_FOLDER
from bench.hardware import Hardware
from bench.hardware.derived import list_leaves

HARDWARE_FOLDER = DATA_FOLDER / "conf" / "hardware"
RELATIVE_TOLERANCE = 0.01
"""Within which numbers are the same: solvers differ in the third digit."""


def read_described_devices() -> list[Hardware]:
    """Every GPU that is described and has speeds, complete with what its description takes from another one."""
    names = [path.stem for path in sorted(HARDWARE_FOLDER.glob("*.yaml")) if find_architecture(path.stem)]
    return [build_run_config(compose_config({"mode": "predict", "hardware": name})).hardware for name in names]


def find_differences(fit: DeviceFit, path: Path) -> list[str]:
    """Places of a file whose numbers are not those of a fit."""
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    different = []
    for place, value in fit.values.items():
        found: Any = written
        for key in place.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not _are_close(value, found):
            different.append(f"{place}: {found} in the file, {value} by the fit")
    return different


def _are_close(value: Any, other: Any) -> bool:
    if isinstance(value, Mapping):
        return (
            isinstance(other, Mapping)
            and value.keys() == other.keys()
            and all(_are_close(value[key], other[key]) for key in value)
        )
    if isinstance(value, str):
        return bool(value == other)
    return isinstance(other, (int, float)) and math.isclose(value, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-6)


def write_device(fit: DeviceFit, path: Path) -> None:
    """Put the numbers of a fit, and where each comes from, into a description."""
    text = path.read_text(encoding="utf-8")
    values: dict[Sequence[str], Any] = {}
    for place, value in fit.values.items():
        values[tuple(place.split("."))] = value
    written = yaml.safe_load(text)
    leaves = [name for name, _ in list_leaves(written)]
    for name in written.get("sources", {}):
        about = [leaf for leaf in leaves if f"{leaf}.".startswith(f"{name}.")]
        if about and all(any(f"{leaf}.".startswith(f"{place}.") for place in fit.values) for leaf in about):
            values["sources", name] = None  # all that it is about has been replaced, or is not there
    values |= {("sources", name): source for name, source in fit.sources.items()}
    path.write_text(set_values(text, values), encoding="utf-8")


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Fit, and compare or write; returns 0, or 1 if files have other numbers than the fit."""
    parser = build_parser("calibration.fit_published", __doc__)
    parser.add_argument("devices", nargs="*", help="names under conf/hardware; all that are known if left out")
    parser.add_argument("--write", action="store_true", help="write the numbers instead of comparing them")
    options = parser.parse_args(arguments)
    described = read_described_devices()
    for name in options.devices:
        require_choice("device", name, tuple(hardware.name for hardware in described))
    fits = fit_devices(described)
    different = []
    for name in options.devices or fits:
        path = HARDWARE_FOLDER / f"{name}.yaml"
        if options.write:
            write_device(fits[name], path)
        different += [f"{name}: {difference}" for difference in find_differences(fits[name], path)]
    if options.write:
        PAGE_PATH.write_text(build_page(fits), encoding="utf-8")
    print(
        "\n".join(different) if different else f"{len(options.devices or fits)} devices: numbers are those of the fit"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
