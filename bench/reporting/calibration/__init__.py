"""What a calibration shows: its tables and curves."""
