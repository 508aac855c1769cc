"""What ``python -m bench.check`` finds out about a machine: that what a sweep measures on it can be believed."""
