"""Layouts of several kinds of parallelism beside FSDP alone: which there are, which cannot be best, which is."""
