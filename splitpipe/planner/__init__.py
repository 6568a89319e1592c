"""The planner behind ``splitpipe.plan``: measures the layers, then chooses how to cut and run them."""
