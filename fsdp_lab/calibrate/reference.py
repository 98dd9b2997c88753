"""The training steps that a calibration measures: small, and with every kind of operator that models are made of."""

from __future__ import annotations

from dataclasses import dataclass

_LANGUAGE = ("model=lm_tiny", "data=synthetic_tokens", "task=language")
_LLAMA_64 = (*_LANGUAGE, "model.dim=64", "model.num_heads=2", "model.num_layers=2", "data.seq_len=128")
_LLAMA_128 = (*_LANGUAGE, "model.dim=128", "model.ffn_dim=384", "model.vocab_size=512", "data.seq_len=128")
_LLAMA_256 = (*_LANGUAGE, "model.dim=256", "model.ffn_dim=768", "model.vocab_size=2048", "data.seq_len=64")
_VISION = ("model=vit_tiny", "data=synthetic")
_VIT_192 = (*_VISION, "model.hidden_dim=192", "model.num_heads=4", "model.mlp_dim=768")
_VIT_384 = (*_VISION, "model.hidden_dim=384", "model.num_heads=6", "model.mlp_dim=1536", "model.num_layers=2")
_MLP = ("model=mlp", "data=synthetic")


@dataclass(frozen=True)
class Reference:
    """A setting to measure.

    Attributes:
        family: of the model. Leaving one family out shows how well a fit predicts models that it has not seen.
        model: the overrides that build it, equal for all of its settings.
        setting: the other overrides.
    """

    family: str
    model: tuple[str, ...]
    setting: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """All overrides."""
        return (*self.model, *self.setting)


def _some(family: str, model: tuple[str, ...], *settings: str) -> list[Reference]:
    return [Reference(family, model, tuple(setting.split())) for setting in settings]


def _batch(size: int) -> str:
    return f"training.global_batch_size={size}"


def references(workers: int) -> list[Reference]:
    """Return the settings to measure. Batches grow with the workers, so each worker's operators stay the same."""
    each = [_batch(size * workers) for size in range(129)]
    plain, block, root, ddp = "precision=fp32", "sharding=per_block", "sharding=root", "sharding=ddp"
    never, always = "reshard_after_forward=never", "reshard_after_forward=always"
    mixed, twice, full = "precision=bf16_mixed", "training.grad_accum_steps=2", "activation_checkpointing=full"
    return [
        *_some(
            "llama", _LLAMA_64,
            f"{block} {plain} {always} {each[4]}", f"{ddp} {plain} {each[8]}", f"{root} {plain} {each[2]}",
            f"{block} precision=fp16 {each[1]}",
        ),
        *_some(
            "llama", _LLAMA_128,
            f"{block} {plain} {always} {each[8]}", f"{block} {plain} {always} {full} {each[8]}",
            f"{block} {plain} {never} {each[4]}", f"{block} {mixed} {always} {each[8]}",
            f"{ddp} {mixed} {each[8]}", f"{root} {plain} {twice} {each[4]}", f"{ddp} {plain} {each[16]}",
        ),
        *_some(
            "llama", _LLAMA_256,
            f"{block} {plain} {always} {each[8]}", f"{block} {mixed} {always} {full} {each[8]}",
            f"{ddp} {plain} {each[8]}", f"{root} precision=bf16 {each[8]}",
        ),
        *_some(
            "vit", _VISION,
            f"{block} {plain} {always} {each[16]}", f"{ddp} {plain} {each[32]}", f"{block} {mixed} {never} {each[8]}",
            f"{block} precision=fp16 {each[4]}",
        ),
        *_some(
            "vit", _VIT_192,
            f"{block} {plain} {always} {each[16]}", f"{block} {plain} {never} {full} {each[16]}",
            f"{block} {mixed} {always} {each[32]}", f"{ddp} {mixed} {twice} {each[32]}", f"{ddp} {plain} {each[64]}",
        ),
        *_some(
            "vit", _VIT_384,
            f"{block} {plain} {always} {each[8]}", f"{root} {mixed} {each[16]}",
            f"{block} {plain} {always} {twice} {each[16]}",
        ),
        *_some(
            "mlp", _MLP,
            f"{block} {plain} {always} {each[32]}", f"{ddp} {plain} {each[64]}", f"{root} {mixed} {each[64]}",
            f"{block} {plain} {always} training.max_grad_norm=1 {each[32]}",
        ),
    ]  # fmt: skip
