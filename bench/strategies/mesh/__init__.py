"""Every kind of parallelism in one mesh of ranks: its layout, how a model is divided over it, and what is refused."""
