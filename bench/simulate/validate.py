"""Predictions held against published numbers: `bench.validation`, under the name by which the command asks for it."""

from bench.validation.command import main

__all__ = ["main"]
