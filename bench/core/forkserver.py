"""Imported by the forkserver alone, first of all: it dies with the process that uses it, and its children with it."""

from bench.core.processes import die_with_parent

die_with_parent()
