"""Figures and one page from records. Reads rows, never writes any."""

from bench.reporting.builder import build_report, write_report
from bench.reporting.reading import read_store

__all__ = ["build_report", "read_store", "write_report"]
