"""What every package may use: errors, typed configuration, plug-ins, number formats, processes. Imports nothing above
it."""
