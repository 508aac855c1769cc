"""How figures look: style, lanes, glyphs, labels, and how a figure becomes a file."""
