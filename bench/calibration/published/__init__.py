"""Kernel curves fitted to microbenchmarks that others have published (results/published/micro*.csv)."""
