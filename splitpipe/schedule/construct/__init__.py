"""Construction of schedules: building blocks, orders of ops, the named schedules, and the search for others."""
