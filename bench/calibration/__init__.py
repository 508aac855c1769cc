"""Measure this machine's own speeds and fit what predictions need to know of them."""
