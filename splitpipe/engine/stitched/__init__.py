"""``backward="autograd"``: clock cycles on the stages' threads, and one graph over all stages, as torchgpipe has it."""
