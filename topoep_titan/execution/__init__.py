"""Carries out a Plan: replica parameters to where they run, tokens out and back, gradients home."""
