"""How weights, gradients and optimizer states are spread over processes."""
