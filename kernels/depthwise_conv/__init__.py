"""Depthwise convolution: each channel with its own filter, forward and backward."""
