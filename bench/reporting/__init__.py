"""Figures and one page from records. Reads rows, never writes any."""

from bench.reporting.builder import build_report, read_store, write_report

__all__ = ["build_report", "read_store", "write_report"]
