"""The backward pass of a stage: the gradients of its inputs first, those of its weights later."""
