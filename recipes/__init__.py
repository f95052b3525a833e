"""Reproduction programs: they loop over training jobs or the simulator; nothing imports them."""
