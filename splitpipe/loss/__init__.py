"""What a number of the batch is made of, seen while microbatches compute it."""
