"""A sweep from plan to results: predictions, progress and tables."""
