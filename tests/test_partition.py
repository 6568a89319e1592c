"""Facts of splitpipe.partition."""
