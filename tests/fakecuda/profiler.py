"""The part of torch's profiler that a CPU build has not: CUPTI, which tells of kernels.

Everything else is torch's own, the CPU's operators in the trace too. A kernel is what the fake CUDA computed, for as
long as the host took to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from tests.fakecuda.runtime import Library


def install() -> None:
    """Have `torch.profiler.profile` take the activity CUDA, and write kernels into its trace."""
    library = Library()
    supported, enable, disable = (
        profiler._supported_activities,
        profiler._enable_profiler,
        profiler._disable_profiler,
    )
    export = profiler.profile.export_chrome_trace
    kernels: list[dict[str, Any]] = []

    def start(config: Any, activities: Sequence[ProfilerActivity], *options: Any, **named: Any) -> None:
        enable(config, activities, *options, **named)
        kernels.clear()
        library.profile(ProfilerActivity.CUDA in activities)

    def stop() -> Any:
        kernels.extend(_event(*kernel) for kernel in library.kernels())
        library.profile(False)
        return disable()

    def write(self: profiler.profile, path: str, *options: Any, **named: Any) -> None:
        export(self, path, *options, **named)
        file = Path(path)
        trace = json.loads(file.read_text())
        trace["traceEvents"] += kernels
        file.write_text(json.dumps(trace))

    profiler._supported_activities = lambda: {*supported(), ProfilerActivity.CUDA}
    profiler._enable_profiler, profiler._disable_profiler = start, stop
    profiler.profile.export_chrome_trace = write  # type: ignore[method-assign, assignment]


def _event(name: str, device: int, stream: int, began_ns: int, ended_ns: int) -> dict[str, Any]:
    """As kineto writes it: microseconds."""
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    times = {"ts": began_ns / 1000, "dur": (ended_ns - began_ns) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": device, "tid": stream, **times}
