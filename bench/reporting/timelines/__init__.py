"""A simulated step as a picture, and as a trace for a viewer."""
