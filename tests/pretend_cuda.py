"""Imported, it makes this process one of a CUDA build, in which touching CUDA spoils whatever is forked afterwards.

As in a real one, `torch.cuda._is_in_bad_fork` is true in a process forked from one that has touched CUDA. A forked
process is a CPU build's again, so that it can compute, and its rank is one that needs CUDA.
"""

from __future__ import annotations

import os
import sys
import types

import torch
import torch.utils._triton

cuda_touches: list[str] = []
"""What touched CUDA in this process: the innermost frames, from the outside in."""

_bad_fork = False


def _record_touch(*_: object) -> int:
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if "importlib" not in frame.f_code.co_filename:
            frames.append(f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    cuda_touches.append(" <- ".join(frames[:8]))
    return 1


def _fake_properties(*_: object) -> types.SimpleNamespace:
    _record_touch()
    return types.SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)


_real_attributes = {
    (torch.version, "cuda"): torch.version.cuda,
    (torch.cuda, "_is_in_bad_fork"): torch.cuda._is_in_bad_fork,
    (torch.cuda, "_lazy_init"): torch.cuda._lazy_init,
    (torch.cuda, "_device_count_nvml"): torch.cuda._device_count_nvml,
    (torch.cuda, "current_device"): torch.cuda.current_device,
    (torch.cuda, "get_device_properties"): torch.cuda.get_device_properties,
    (torch.cuda, "get_device_capability"): torch.cuda.get_device_capability,
    (torch.utils._triton, "has_triton"): torch.utils._triton.has_triton,
}
_fake_attributes = (
    *(
        "13.0",
        lambda: _bad_fork,
        _record_touch,
        lambda: 1,
        _record_touch,
        _fake_properties,
        lambda *_: (_record_touch(), (9, 0))[1],
    ),
    lambda: bool(_record_touch()) and False,
)


def _restore_cpu_build() -> None:
    global _bad_fork
    if not hasattr(torch._C, "_cuda_getDeviceCount"):  # forked from a forked one
        return
    _bad_fork = bool(cuda_touches)
    del torch._C._cuda_getDeviceCount, torch._C._cuda_getCurrentRawStream
    for (module, name), value in _real_attributes.items():
        if name != "_is_in_bad_fork":
            setattr(module, name, value)
    if rank_module := sys.modules.get("bench.rank.run_rank"):
        rank_module.needs_cuda = lambda config: True  # type: ignore[attr-defined]


for (_module, _name), _value in zip(_real_attributes, _fake_attributes, strict=True):
    setattr(_module, _name, _value)
torch._C._cuda_getDeviceCount = _record_touch  # type: ignore[attr-defined]
torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_restore_cpu_build)
