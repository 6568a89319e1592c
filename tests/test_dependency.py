"""Facts of splitpipe.dependency."""
