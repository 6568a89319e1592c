"""Search for schedules: from words and periods to whole schedules."""
