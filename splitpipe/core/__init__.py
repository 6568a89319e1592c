"""The lowest layer: devices, threads, graphs and random numbers. It knows nothing about layers or schedules."""
