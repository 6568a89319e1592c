"""What ``splitpipe.plan`` is made of: measure the layers, then choose how to cut and run them."""
