"""Our image classifiers, as `model._target_` names them. A command checks their sizes without PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.key import at_least_one, divisors
from fsdp_lab.config.workload import ModelSource
from fsdp_lab.workloads.examples.vision import VIT_TP_PLAN

if TYPE_CHECKING:
    from torch import nn


class ImageClassifier(ModelSource):
    """A model of square images, whose arguments are sizes."""

    input_kind = "images"

    def check(self, **sizes: int) -> None:
        """Check that each size is 1 or more. Raises ConfigError."""
        for name, size in sizes.items():
            if wrong := at_least_one(size):
                raise ConfigError(f"model.{name}={size} {wrong}.")

    def image_sizes(self, *, image_size: int, num_channels: int, num_classes: int, **_: Any) -> dict[str, int]:
        return {"image_size": image_size, "num_channels": num_channels, "num_classes": num_classes}


class Vit(ImageClassifier):
    """Vision Transformers of torchvision; the first convolution is replaced if images are not RGB."""

    def __call__(
        self,
        *,
        image_size: int,
        num_channels: int,
        patch_size: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        mlp_dim: int,
        num_classes: int,
    ) -> nn.Module:
        """Return a model; its blocks are torchvision's `EncoderBlock`.

        Args:
            image_size: height and width of an image, in pixels.
            num_channels: channels of an image.
            patch_size: height and width of a patch; divides `image_size`.
            num_layers: blocks.
            num_heads: attention heads; divides `hidden_dim`.
            hidden_dim: width of the model.
            mlp_dim: width of a block's MLP.
            num_classes: number of classes.
        """
        from torch import nn

        from fsdp_lab.workloads.examples.vision.vit import VisionTransformer

        model = VisionTransformer(
            image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim, num_classes=num_classes
        )
        if num_channels != 3:
            model.conv_proj = nn.Conv2d(num_channels, hidden_dim, kernel_size=patch_size, stride=patch_size)
        return model

    def tp_plan(self, **_: Any) -> dict[str, str]:
        return VIT_TP_PLAN

    def tp_sizes(self, **sizes: int) -> dict[str, int]:
        return {"mlp_dim": sizes["mlp_dim"]}

    def check(self, **sizes: int) -> None:
        """Check that the sizes divide each other. Raises CombinationError, or ConfigError for one below 1."""
        super().check(**sizes)
        image_size, patch_size = sizes["image_size"], sizes["patch_size"]
        hidden_dim, num_heads = sizes["hidden_dim"], sizes["num_heads"]
        if image_size % patch_size:
            raise CombinationError(
                f"model.patch_size={patch_size} does not divide model.image_size={image_size}; use one of "
                f"{divisors(image_size)}.",
            )
        if hidden_dim % num_heads:
            raise CombinationError(
                f"model.num_heads={num_heads} does not divide model.hidden_dim={hidden_dim}; use one of "
                f"{divisors(hidden_dim)}.",
            )


class Perceptron(ImageClassifier):
    """Multilayer perceptrons; see `Mlp`."""

    def __call__(
        self,
        *,
        image_size: int,
        num_channels: int,
        num_layers: int,
        hidden_dim: int,
        num_classes: int,
    ) -> nn.Module:
        """Return a model of `num_layers` hidden layers of `hidden_dim`; its blocks are `MlpBlock`."""
        from fsdp_lab.workloads.examples.vision.mlp import Mlp

        return Mlp(num_channels * image_size**2, [hidden_dim] * num_layers, num_classes)


vit, mlp = Vit(), Perceptron()
