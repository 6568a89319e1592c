"""``splitpipe.check``: whether a pipeline computes, on the user's own batch, what one microbatch of it computes."""
