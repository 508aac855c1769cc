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

from tests.fakecuda.runtime import FakeCudaLibrary


def install() -> None:
    """Have `torch.profiler.profile` take the activity CUDA, and write kernels into its trace."""
    library = FakeCudaLibrary()
    supported, enable, disable = (
        profiler._supported_activities,
        profiler._enable_profiler,
        profiler._disable_profiler,
    )
    original_export = profiler.profile.export_chrome_trace
    kernels: list[dict[str, Any]] = []

    def start(config: Any, activities: Sequence[ProfilerActivity], *options: Any, **keywords: Any) -> None:
        enable(config, activities, *options, **keywords)
        kernels.clear()
        library.set_profiling(ProfilerActivity.CUDA in activities)

    def stop() -> Any:
        kernels.extend(_build_event(*kernel) for kernel in library.list_kernels())
        library.set_profiling(False)
        return disable()

    def export_with_kernels(self: profiler.profile, path: str, *options: Any, **keywords: Any) -> None:
        original_export(self, path, *options, **keywords)
        file = Path(path)
        trace = json.loads(file.read_text())
        trace["traceEvents"] += kernels
        file.write_text(json.dumps(trace))

    profiler._supported_activities = lambda: {*supported(), ProfilerActivity.CUDA}
    profiler._enable_profiler, profiler._disable_profiler = start, stop
    profiler.profile.export_chrome_trace = export_with_kernels  # type: ignore[method-assign, assignment]


def _build_event(name: str, device: int, stream: int, began_ns: int, ended_ns: int) -> dict[str, Any]:
    """As kineto writes it: microseconds."""
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    times = {"ts": began_ns / 1000, "dur": (ended_ns - began_ns) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": device, "tid": stream, **times}
