"""What a search is made of, from words to whole schedules."""
