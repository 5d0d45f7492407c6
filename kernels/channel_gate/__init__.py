"""Squeeze-and-excitation's global average pooling and gating per sample and channel, forward and backward."""
