"""Convolution of each channel with a filter of its own, forward and backward."""
