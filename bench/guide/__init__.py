"""The strategy guide: a decision tree whose every step is answered by a prediction, beside the ranked prediction."""
