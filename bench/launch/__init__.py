"""Launchers: how runs get their processes. One file each: submitit on this machine, and one run alone."""
