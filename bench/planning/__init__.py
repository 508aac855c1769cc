"""From what the user typed to the runs to execute: parse, expand, compose, check against the store."""
