"""Recorded steps: their times, and where those went."""
