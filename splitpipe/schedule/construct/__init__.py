"""How schedules are made: building blocks, orders of ops, and the named schedules."""
