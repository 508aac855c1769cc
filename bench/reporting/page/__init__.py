"""The report's HTML page and what it lists."""
