"""Slow, independent implementations that tests compare the product with."""
