"""Global average pooling and the product with a gate of one value per sample and channel, forward and backward."""
