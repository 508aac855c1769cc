"""Devices: what they are (peaks, memory), which one this machine has, and a memory limit that really limits."""

from bench.hardware.description import Hardware
from bench.hardware.detect import detect, refuse_unsupported
from bench.hardware.limit import MemoryLimit
from bench.hardware.speeds import Speeds

__all__ = ["Hardware", "MemoryLimit", "Speeds", "detect", "refuse_unsupported"]
