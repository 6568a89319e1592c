"""Facts of splitpipe.transfer."""
