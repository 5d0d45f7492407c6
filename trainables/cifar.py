"""CIFAR-10 and CIFAR-100 with ResNet-18 and EfficientNet-B0, the experiments of Tri-Accel's section 4."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor, nn

from triaccel_ray.config import BatchConfig, ControlConfig, ExecutionConfig
from triaccel_ray.search_spaces.tuned import tuned_thresholds
from triaccel_ray.trainables.cifar_files import read_cifar
from triaccel_ray.trainables.images import ImageSource, Preparation
from triaccel_ray.trainables.models import Stem, efficientnet_b0, resnet18
from triaccel_ray.trainables.split import SPLIT_SEED, stratified_split
from triaccel_ray.trainables.task import WITHIN_BUDGET, Purpose, Recipe, Splits, Task

_NUM_VALIDATION = 5_000
# A GPU reads a batch of 96 from host memory in 10 us, from its own in 2 us. There, the images would take 0.15 GB.
_EXECUTION = ExecutionConfig(data_on="host")
_CHANNEL_MEAN = {10: (0.4914, 0.4822, 0.4465), 100: (0.5071, 0.4865, 0.4409)}
_CHANNEL_STD = {10: (0.2470, 0.2435, 0.2616), 100: (0.2673, 0.2564, 0.2762)}


class CifarTask(Task):
    """The data of either set: 45,000 training and 5,000 validation images, or all 50,000 and the 10,000 for testing.

    Images stay uint8; batches are cropped, flipped, normalized and resized on the device. Random crops use reflection
    padding, and each image is flipped in every other epoch.
    """

    num_classes: ClassVar[Literal[10, 100]] = 10
    input_size: ClassVar[int | None] = None
    """Edge in pixels to which the 32 x 32 images are resized; None: not resized."""
    cutout: ClassVar[int] = 0
    """Edge in pixels of the square that is cut out of every training image; 0: none."""
    mirror_views: ClassVar[bool] = False
    """Whether the test averages the model's outputs for each image and its mirror image."""

    def data(self, purpose: Purpose) -> Splits:
        """Returns the samples for `purpose`; SEARCH does not read test images."""
        is_final = purpose is Purpose.FINAL
        (images, labels), *test = read_cifar(self.num_classes, self.data_dir, with_test=is_final)
        if is_final:
            return self._splits((images, labels), *test, mirror_views=self.mirror_views)
        train, validation = stratified_split(labels, _NUM_VALIDATION, SPLIT_SEED)
        return self._splits((images[train], labels[train]), (images[validation], labels[validation]))

    def _splits(
        self, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], *, mirror_views: bool = False
    ) -> Splits:
        plain = Preparation(
            mean=_CHANNEL_MEAN[self.num_classes], std=_CHANNEL_STD[self.num_classes], size=self.input_size
        )
        augmented = replace(plain, augment=True, cutout=self.cutout)
        viewed = replace(plain, mirror_views=mirror_views)
        return Splits(train=ImageSource(*train, augmented), held_out=ImageSource(*held_out, viewed))


class Cifar10ResNet18(CifarTask):
    """ResNet-18 with the 3 x 3 stem that suits small images."""

    stem: ClassVar[Stem] = "cifar"
    mirror_views: ClassVar[bool] = True
    # Chosen for CIFAR-10 and 20 epochs; docs/benchmarks.md lists the alternatives tried.
    recipe: ClassVar[Recipe] = Recipe(
        epochs=20,
        lr=0.2,
        warmup_epochs=2.0,
        nesterov=True,
        weight_decay=4e-4,
        norm_bias_lr_factor=16.0,
        label_smoothing=0.1,
    )
    # Found: BF16 in every layer. The batch grows in one move, as each size costs a capture, to the fastest of five on
    # an H200; `linear` keeps the training trajectory per sample. With a bound by the gradient noise scale it grows too
    # late to pay, and gains no accuracy: docs/results.md.
    control: ClassVar[ControlConfig] = tuned_thresholds("cifar10-resnet18").onto(
        ControlConfig(
            **WITHIN_BUDGET, batch=BatchConfig(maximum=224, step_up=128, lr_rule="linear"), execution=_EXECUTION
        )
    )

    def model(self) -> nn.Module:
        """Returns the network, 11.2 million parameters."""
        return resnet18(self.num_classes, self.stem)


class Cifar10ResNet18Long(Cifar10ResNet18):
    """The same network trained five times as long, in batches of 512 that only a lack of memory makes smaller."""

    cutout: ClassVar[int] = 12
    recipe: ClassVar[Recipe] = replace(
        Cifar10ResNet18.recipe, epochs=100, warmup_epochs=15.0, weight_decay=5e-4, norm_bias_lr_factor=4.0
    )
    control: ClassVar[ControlConfig] = replace(
        Cifar10ResNet18.control, batch=replace(Cifar10ResNet18.control.batch, start=512, maximum=512)
    )


class Cifar100ResNet18(Cifar10ResNet18):
    """The same on CIFAR-100."""

    num_classes: ClassVar[Literal[10, 100]] = 100
    # A batch that grows at once costs half a point, and one that waits for the noise scale saves no time:
    # docs/results.md. So it does not grow. --batch-max also sets the sizes of --fixed and tune-batch.
    control: ClassVar[ControlConfig] = replace(
        Cifar10ResNet18.control, batch=replace(Cifar10ResNet18.control.batch, maximum=96)
    )


class Cifar10ResNet18ImagenetStem(Cifar10ResNet18):
    """ResNet-18 as torchvision builds it for ImageNet, which matches the paper's memory figures."""

    stem: ClassVar[Stem] = "imagenet"


class Cifar100ResNet18ImagenetStem(Cifar10ResNet18ImagenetStem):
    """The same on CIFAR-100."""

    num_classes: ClassVar[Literal[10, 100]] = 100
    control: ClassVar[ControlConfig] = Cifar100ResNet18.control


class Cifar10EfficientNetB0(CifarTask):
    """EfficientNet-B0 on images resized to 224 x 224, the size it was designed for."""

    input_size: ClassVar[int | None] = 224
    # BF16, because under FP16 autocast the loss was not finite in some step of the first epoch.
    recipe: ClassVar[Recipe] = Recipe(
        epochs=30, lr=0.1, nesterov=True, weight_decay=5e-4, label_smoothing=0.1, amp="bf16"
    )
    # Found: FP16 in every layer. The batch does not grow: that cost 31 to 65 s in five epochs of 7 s. rho_low and
    # rho_high are the defaults: those found, with batches up to 512, shrank a batch that fits and kept it small.
    control: ClassVar[ControlConfig] = replace(
        tuned_thresholds("cifar10-efficientnet-b0").onto(ControlConfig(**WITHIN_BUDGET, execution=_EXECUTION)),
        batch=BatchConfig(maximum=96),
    )

    def model(self) -> nn.Module:
        """Returns the network, 4.0 million parameters."""
        return efficientnet_b0(self.num_classes)


class Cifar100EfficientNetB0(Cifar10EfficientNetB0):
    """The same on CIFAR-100."""

    num_classes: ClassVar[Literal[10, 100]] = 100
