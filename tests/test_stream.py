"""Facts of splitpipe.stream."""
