"""The models of transformers as `model._target_` names them: one callable for each kind of task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.config.errors import CombinationError, ConfigError
from fsdp_lab.config.workload import ModelSource
from fsdp_lab.workloads.hf import attention, weights
from fsdp_lab.workloads.hf.configuration import Config, folder_of, named, read_config, translated
from fsdp_lab.workloads.hf.library import transformers

# The words of transformers' plans -> ours.
_TP_WORDS = {
    "colwise": "colwise", "rowwise": "rowwise", "embedding_rowwise": "rowwise", "embedding_colwise": "colwise",
    "colwise_gather_output": "colwise_gathered", "rowwise_split_input": "rowwise_split",
    "replicated_with_grad_allreduce": "heads", "replicate": "",
}  # fmt: skip
_TP_DIVIDES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_SHIFTS = "prepare_decoder_input_ids_from_labels"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class HuggingFace(ModelSource):
    """Models of one of transformers' auto classes.

    Attributes:
        mapping: the name of its table, configuration class -> model class.
        kind: with its article, for messages.
        prepare: changes a model after it was built.
        input_kind: see `ModelSource`.
    """

    auto_class: str
    mapping: str
    kind: str
    prepare: Callable[[Any], None]
    input_kind: str | None = None

    def __call__(self, config: Config, pretrained: bool = False, **overrides: Any) -> nn.Module:
        """Return the model in float32, with random weights.

        Args:
            config: a folder with a config.json, such a file, a name on the hub, or the values themselves.
            pretrained: ignored: weights are loaded after the model was sharded.
        """
        made: nn.Module = self._plain(config, overrides)
        self.prepare(made)
        return made

    def check(self, config: Config | None = None, pretrained: bool = False, **overrides: Any) -> None:
        library, hf_config = transformers(), read_config(config, overrides)
        if type(hf_config) not in (classes := getattr(library, self.mapping)):
            others = [name for name, other in MODELS.items() if type(hf_config) in getattr(library, other.mapping)]
            remedy = f"use model={' or model='.join(others)}" if others else "transformers has it only for other tasks"
            raise ConfigError(f"{named(config)}: {hf_config.model_type} is not {self.kind}; {remedy}.")
        if self == seq2seq and not hasattr(classes[type(hf_config)], _SHIFTS):
            raise ConfigError(
                f"{named(config)}: {classes[type(hf_config)].__name__} has no {_SHIFTS}, which makes the decoder's "
                "tokens from the labels; use a model that has it, such as T5 or BART, or model._target_ with your own "
                "function."
            )
        # Models that transformers also has for masked tokens see the tokens that they must predict.
        masked = type(hf_config) in library.MODEL_FOR_MASKED_LM_MAPPING and not hf_config.is_encoder_decoder
        if self == causal_lm and masked and getattr(hf_config, "is_decoder", None) is False:
            raise ConfigError(
                f"{named(config)}: {hf_config.model_type} attends to later tokens, so it sees the tokens that it must "
                "predict; use model.is_decoder=true, or a causal model such as gpt2 or llama."
            )

    def check_files(self, config: Config, pretrained: bool = False, **overrides: Any) -> None:
        """Check that the sizes fit each other, and with `pretrained` that the weights are complete.

        Raises:
            UserError: the sizes do not fit, or the weights are missing, damaged, or another model's.
        """
        with translated(config, overrides):
            model = self._on_meta(config, overrides)
        if pretrained:
            weights.places(model, self._stored(config), str(config))

    def load_weights(self, config: Config, pretrained: bool = False, **overrides: Any) -> Any:
        """Return a function that reads this rank's part of the weights from the folder; None without `pretrained`."""
        if not pretrained:
            return None

        def load(state: Mapping[str, Tensor]) -> None:
            folder = folder_of(config)
            assert folder is not None
            model = self._on_meta(config, overrides)
            weights.load(folder, weights.places(model, self._stored(config), str(config)), state)

        return load

    def save(self, config: Config, pretrained: bool = False, **overrides: Any) -> Any:
        """Return a function that writes whole weights and the configuration as `from_pretrained` reads them."""
        return lambda state, folder: weights.save(self._on_meta(config, overrides), state, folder)

    def _stored(self, config: Config) -> dict[str, torch.Size]:
        """Return the shapes of the tensors in the folder's weights."""
        if not isinstance(config, str):
            raise ConfigError(
                "model.pretrained=true reads weights from the folder that model.config names, but model.config "
                "has the values of a configuration; use model.config=<folder>, or model.pretrained=false."
            )
        return weights.stored_in(folder_of(config), config)

    def _on_meta(self, config: Config, overrides: dict[str, Any]) -> Any:
        """Return the model as transformers makes it, without values."""
        with torch.device("meta"):
            return self._plain(config, overrides)

    def _plain(self, config: Config, overrides: dict[str, Any]) -> Any:
        return getattr(transformers(), self.auto_class).from_config(
            read_config(config, overrides), dtype=torch.float32, trust_remote_code=False
        )

    def vocab_size(self, config: Config | None = None, pretrained: bool = False, **overrides: Any) -> int | None:
        size = getattr(read_config(config, overrides).get_text_config(), "vocab_size", None)
        return size if isinstance(size, int) else None

    def num_positions(self, config: Config | None = None, pretrained: bool = False, **overrides: Any) -> int | None:
        """Return the most tokens that a row may have; None: not limited, or not known."""
        count = getattr(read_config(config, overrides).get_text_config(), "max_position_embeddings", None)
        return count if isinstance(count, int) else None

    def tp_plan(self, config: Config, pretrained: bool = False, **overrides: Any) -> dict[str, str]:
        """Return transformers' plan in our words.

        Raises:
            CombinationError: it divides a module in a way that is not known here.
        """
        model = self._on_meta(config, overrides)
        heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
        every = "\n".join(name for name, _ in (*model.named_modules(), *model.named_parameters()))
        plan = {}
        for name, word in model.tp_plan.items():
            if not re.search(rf"^{name.replace('.', '[.]').replace('*', '[0-9]+')}$", every, re.MULTILINE):
                continue  # of other models with this plan
            if word not in _TP_WORDS:
                raise CombinationError(
                    f"{named(config)}: transformers divides {name} by {word}, which has no counterpart here; give a "
                    "plan of your own with model.tp_plan, or use sharding.tp=1."
                )
            plan[name] = "loss_parallel" if name in heads else _TP_WORDS[word]
        return {name: word for name, word in plan.items() if word}

    def tp_sizes(self, config: Config, pretrained: bool = False, **overrides: Any) -> dict[str, int]:
        values = read_config(config, overrides).get_text_config()
        sizes = {name: getattr(values, name, None) for name in _TP_DIVIDES}
        return {name: size for name, size in sizes.items() if isinstance(size, int)}

    def image_sizes(self, config: Config | None = None, pretrained: bool = False, **overrides: Any) -> dict[str, int]:
        if self.input_kind != "images":
            return {}
        hf_config = read_config(config, overrides)
        known = {name: getattr(hf_config, name, None) for name in ("image_size", "num_channels")}
        known["num_classes"] = hf_config.num_labels
        return {name: size for name, size in known.items() if isinstance(size, int)}


def _causal(model: Any) -> None:
    attention.use(model, attention.UNPADDED)
    model.register_forward_pre_hook(_with_full_rows, with_kwargs=True)


def _with_full_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Mark every token as real if the caller gives no mask and no positions.

    Without a mask, many models read the values of positions to find texts that were packed into one row.
    """
    tokens = args[0] if args else kwargs.get("input_ids")
    masked = len(args) > 1 or kwargs.get("attention_mask") is not None
    attention.change(module, attention.PADDED if masked else attention.UNPADDED)
    if tokens is not None and not masked and kwargs.get("position_ids") is None:
        kwargs["attention_mask"] = torch.ones_like(tokens)
    kwargs.setdefault("use_cache", False)
    return args, kwargs


def _seq2seq(model: Any) -> None:
    attention.use(model, attention.PADDED)
    model.register_forward_pre_hook(_with_decoder_inputs, with_kwargs=True)


def _with_decoder_inputs(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Give the decoder the shifted labels, and the model no labels.

    With labels it would compute an unused loss, and hold the probabilities of all tokens a second time.
    """
    labels = kwargs.pop("labels", None)
    if labels is not None:
        kwargs["decoder_input_ids"] = module.prepare_decoder_input_ids_from_labels(labels)
    kwargs.setdefault("use_cache", False)
    return args, kwargs


def _as_it_is(model: Any) -> None:
    """Change nothing: images have no padding, and their models no cache."""


causal_lm = HuggingFace(
    "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "a causal language model", _causal, "tokens"
)
seq2seq = HuggingFace(
    "AutoModelForSeq2SeqLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "a sequence-to-sequence model",
    _seq2seq,
    "pairs of texts",
)
image_classification = HuggingFace(
    "AutoModelForImageClassification",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "an image classifier",
    _as_it_is,
    "images",
)
# By their options in conf/model.
MODELS = {"hf_causal_lm": causal_lm, "hf_seq2seq": seq2seq, "hf_image_classification": image_classification}
