"""The decision tree: which strategy, answered step by step with numbers of predictions."""
