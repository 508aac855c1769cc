"""From what was typed to a checked configuration: Hydra composition, grids, the run configuration and its run_id."""
