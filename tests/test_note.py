"""Facts of splitpipe.note."""
