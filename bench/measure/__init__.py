"""Measuring: the timed loop, clocks, memory, running out of it, the environment."""
