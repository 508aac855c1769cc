"""What the harness costs: `bench.run` against a bare hand-written DDP script that does the same work."""
