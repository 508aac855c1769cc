"""Predictions held against what others published: usable rows, how far off each is, and the page that says so."""
