"""Sizes in bytes."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
