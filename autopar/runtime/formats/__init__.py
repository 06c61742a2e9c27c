"""Files of checkpoints and weights, and the states of optimizers in them."""
