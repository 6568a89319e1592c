"""Pictures of schedules with times, one file each: text, SVG, an HTML page."""
