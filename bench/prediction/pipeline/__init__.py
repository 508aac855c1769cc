"""Predictions of runs whose model is cut into pipeline stages."""
