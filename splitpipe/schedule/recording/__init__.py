"""Recorded training steps: their times, and the reasons for idle time."""
