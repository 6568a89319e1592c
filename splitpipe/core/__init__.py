"""The ground floor: devices, threads, graphs and random numbers. Nothing here knows of layers or schedules."""
