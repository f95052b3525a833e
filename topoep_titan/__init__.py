"""Load-balanced expert-parallel MoE pretraining on torchtitan: rooms with one-way doors."""

__version__ = "0.1.0"
