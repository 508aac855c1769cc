"""Dashboards of what a tracker keeps: a workspace and a report in wandb, and alerts, as code."""
