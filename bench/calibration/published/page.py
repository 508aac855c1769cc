"""The page that says how well the curves fit: docs/results/kernels.md."""

from __future__ import annotations

from collections.abc import Mapping

from bench.calibration.published.alignment_fit import UNALIGNED_SHARE
from bench.calibration.published.device_fit import PRODUCTS, DeviceFit
from bench.core.installation import DATA_FOLDER
from bench.hardware.speeds import MANY_GPUS_SHARE
from bench.hardware.sustained_clocks import (
    ATTENTION_SHARE,
    MEAN_SHARE_AT_ONE_WATT,
    MEMORY_BOUND_POWER_SHARE,
    SUSTAINED_SHARES_AT_ONE_WATT,
)

PAGE_PATH = DATA_FOLDER / "docs" / "results" / "kernels.md"

INTRODUCTION = """# Kernels

How fast products, attention, kernels bound by memory and collectives run on each GPU, as predictions have it. The
curves are fitted to microbenchmarks that others have published (`results/published/micro.csv`, `micro_attention.csv`
and `micro_products.csv`; sources and licences in [published numbers](published.md)).
`python -m bench.calibration.fit_published --write` makes this page and the numbers in `conf/hardware`.

* A **product** takes waves of thread blocks, each with its tile, its depth and a start and end (`half_depth`), or as
  long as its operands take from memory. `efficiency` is the share of the dense peak that large products reach in a
  short burst.
* Where the rows of an operand in 16 bits do not begin at multiples of 16 bytes (heads of 150 numbers, GPT-2's
  vocabulary of 50,257 tokens), cuBLAS takes kernels that load less at once: `unaligned_share` is what is left of the
  speed, by the bytes that the rows do begin at multiples of. Alignments and devices that nobody timed are assumed to be
  like others: such kernels are those of the A100, also on newer GPUs. What is not aligned in the result alone costs
  nothing here: that was not timed either.
* A **burst** is faster than training: a power limit sets the clocks of work that lasts. Of products that run alone
  `min(1, s (W / TFLOP/s)^(1/3))` is left, with the board's power limit and the speed of the burst. Power grows with the
  cube of the clock; s is {shares}
  (products timed at length), and {mean:.3g}, their mean, for all others; {attention:g} of that for attention, which
  draws more (timed on an H100). In a step kernels do not run alone: those that wait for memory draw {memory_bound:.0%}
  of the limit (copies on an H100), and a step has the clocks at which all its kernels draw the limit on average.
* **Attention** has a curve for each kernel. The one that runs is PyTorch's choice by device and version, or
  `hardware.speeds.attention.kernel`. Its time grows with narrow heads (`half_width`), short sequences (`half_length`)
  and multiprocessors that wait for the last block.
* **Kernels bound by memory** take their bytes over a share of the bandwidth, and some microseconds each. PyTorch's
  norms have speeds of their own.
* **Collectives inside a node** follow NCCL's own model, with a bandwidth by number of GPUs and a latency.

## What is fitted to training runs

One number for kernels, the same for all devices: in a run of several GPUs products and attention have {training:g} of
the speed that the above says (`bench/hardware/speeds.py`). Chosen on rows of llm-foundry and the FSDP paper, as
`links.node_efficiency` was. `overlap_loss` is calculon's, and `launch` is assumed but for `kernel_us`.
"""


def build_page(fits: Mapping[str, DeviceFit]) -> str:
    """The page as Markdown."""
    introduction = INTRODUCTION.format(
        shares=", ".join(f"{share:g} for chips of the {name}" for name, share in SUSTAINED_SHARES_AT_ONE_WATT.items()),
        mean=MEAN_SHARE_AT_ONE_WATT,
        attention=ATTENTION_SHARE,
        memory_bound=MEMORY_BOUND_POWER_SHARE,
        training=MANY_GPUS_SHARE,
    )
    return "\n".join(
        [introduction, _build_errors(fits), _build_numbers(fits), _build_alignment(fits), _build_attention(fits)]
    )


def _build_errors(fits: Mapping[str, DeviceFit]) -> str:
    rows = [
        f"| {name} | {kind} | {errors.count} | {errors.median:.1%} | {errors.ninth_decile:.1%} |"
        for name, fit in fits.items()
        for kind, errors in fit.errors.items()
    ]
    heading = (
        "## How well they fit\n\nErrors of points that were held out, every third, from a curve fitted to the others: "
        "half of them are below the median, nine of ten below the last column.\n\n"
        "| device | curve | points held out | median error | 90th percentile |\n|---|---|--:|--:|--:|"
    )
    return "\n".join([heading, *rows, ""])


def _build_numbers(fits: Mapping[str, DeviceFit]) -> str:
    rows = []
    for name, fit in fits.items():
        efficiency, shares = (fit.values.get(f"speeds.matmul.{key}") for key in ("efficiency", "sustained_share"))
        assert isinstance(efficiency, dict)
        format_ = "bf16" if "bf16" in efficiency else "fp16"
        sustained = shares[format_] if isinstance(shares, dict) else 1.0
        memory = fit.values.get("speeds.memory_efficiency")
        origin = fit.sources["speeds.matmul.efficiency"].partition(":")[0]
        burst = efficiency[format_]
        rows.append(f"| {name} | {burst:.3g} | {sustained:.3g} | {burst * sustained:.3g} | {origin} | {memory} |")
    heading = (
        "## Products and memory\n\nShares of the dense 16-bit peak, and of the memory's bandwidth on paper.\n\n"
        "| device | in a burst | left while training | product of both | burst is | memory |\n|---|--:|--:|--:|---|--:|"
    )
    return "\n".join([heading, *rows, ""])


def _build_alignment(fits: Mapping[str, DeviceFit]) -> str:
    rows = []
    for name, fit in fits.items():
        shares = fit.values.get(UNALIGNED_SHARE)
        if isinstance(shares, dict):
            origin = fit.sources[UNALIGNED_SHARE].replace(f" ({PRODUCTS})", "")
            rows.append(f"| {name} | {' | '.join(f'{share:.3g}' for share in shares.values())} | {origin} |")
    heading = (
        "## Products not aligned\n\nWhat is left of the speed where rows begin at multiples of so many bytes.\n\n"
        "| device | 2 | 4 | 8 | |\n|---|--:|--:|--:|---|"
    )
    return "\n".join([heading, *rows, ""])


def _build_attention(fits: Mapping[str, DeviceFit]) -> str:
    rows = []
    for name, fit in fits.items():
        kernels = fit.values["speeds.attention.kernels"]
        assert isinstance(kernels, dict)
        for kernel, numbers in kernels.items():
            cells = [f"{numbers[key]:.3g}" for key in ("forward", "backward", "half_width", "half_length")]
            origin = fit.sources[f"speeds.attention.kernels.{kernel}"].partition(":")[0]
            rows.append(
                f"| {name} | {kernel} | {' | '.join(cells)} | {numbers.get('sustained_share', 1.0):.3g} | {origin} |"
            )
    heading = (
        "## Attention\n\n| device | kernel | forward | backward | half width | half length | left while training | "
        "numbers are |\n|---|---|--:|--:|--:|--:|--:|---|"
    )
    return "\n".join([heading, *rows, ""])
