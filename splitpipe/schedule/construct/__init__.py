"""Construction of schedules: building blocks, orders of ops, and the named schedules."""
