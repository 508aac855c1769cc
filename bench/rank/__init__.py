"""One rank of a run: process group, timed loop, memory, profiler, environment, and the row that comes of it."""
