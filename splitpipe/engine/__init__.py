"""Runs any module as a pipeline: its own forward, once per microbatch, in segments from one border to the next."""
