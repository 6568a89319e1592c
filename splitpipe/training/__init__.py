"""One training step with a schedule: its ops, how they exchange values, the loss, and handing over the gradients."""
