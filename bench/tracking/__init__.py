"""Trackers: where attempts are shown beside the store. One file each; a tracker's YAML names its file."""

from bench.tracking.base import Tracker, TrackerSession, load_tracker
from bench.tracking.client import TrackerClient
from bench.tracking.none import NO_TRACKER, NoTracker

__all__ = ["NO_TRACKER", "NoTracker", "Tracker", "TrackerClient", "TrackerSession", "load_tracker"]
