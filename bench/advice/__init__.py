"""Advice from predictions: which strategy, which batch, how long; what `python -m bench.predict` answers with."""
