"""How figures look: style, lanes, and how a figure becomes a file."""
