"""Facts of splitpipe.phase."""
