"""One optimizer step: optimizer, engine and the phases of a step."""
