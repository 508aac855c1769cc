"""Figures and one page from records. Reads rows, never writes any."""

from bench.reporting.builder import build, read_store, write_report

__all__ = ["build", "read_store", "write_report"]
