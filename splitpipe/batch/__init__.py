"""A batch cut into microbatches: which values are, along which dimension or row by row, and how outputs are joined."""
