"""One training step by a schedule: its ops, their exchange of values, the loss, and the gradients handed over."""
