"""Devices: what they are (peaks, memory), which one this machine has, and a memory limit that really limits."""

from bench.hardware.description import Hardware
from bench.hardware.detect import detect_device, refuse_unsupported
from bench.hardware.limit import MemoryLimit
from bench.hardware.speeds import HardwareSpeeds

__all__ = ["Hardware", "HardwareSpeeds", "MemoryLimit", "detect_device", "refuse_unsupported"]
