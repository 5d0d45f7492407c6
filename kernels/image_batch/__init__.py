"""Training batches of images in one launch: gathered, cropped, flipped, normalized and cast."""

from triaccel_ray.kernels.image_batch.api import image_batch

__all__ = ["image_batch"]
