"""Step time against microbatches and against stages."""
