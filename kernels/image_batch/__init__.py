"""Training batches of images in one launch: gathered, cropped, flipped, normalised and cast."""

from kernels.image_batch.api import image_batch

__all__ = ["image_batch"]
