"""One question in a browser: its state is its address and its command line, its answer is that of ``bench.predict``."""
