"""Trackers: where attempts are shown beside the store. One file each; a tracker's YAML names its file."""

from bench.tracking.base import Session, Tracker, load_tracker
from bench.tracking.courier import Courier
from bench.tracking.none import NO_TRACKER, NoTracker

__all__ = ["NO_TRACKER", "Courier", "NoTracker", "Session", "Tracker", "load_tracker"]
