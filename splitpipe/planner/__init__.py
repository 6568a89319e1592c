"""The planner behind ``splitpipe.plan``: measures the layers, then chooses how to split and run them."""
