"""Replays routing through planner and cluster, event by event: counts in, a simulated step out."""
