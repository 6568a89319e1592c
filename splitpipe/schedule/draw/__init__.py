"""Pictures of played schedules, a file each: text, SVG, a page of HTML, a trace for Perfetto."""
