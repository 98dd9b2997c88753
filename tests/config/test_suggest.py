"""What a mistyped key was meant for: of keys as users of other trainers type them."""

from __future__ import annotations

from fsdp_lab.config import all_keys
from fsdp_lab.config.suggest import closest

MEANT = {
    "optimizer.learning_rate": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "training.lr": "optimizer.lr",
    "optimizer.rate": "optimizer.lr",
    "optimizer.wd": "optimizer.weight_decay",
    "batch_size": "training.global_batch_size",
    "training.train_batch_size": "training.global_batch_size",
    "training.gradient_accumulation_steps": "training.grad_accum_steps",
    "training.gradient_clipping": "training.max_grad_norm",
    "num_workers": "cluster.num_workers",
    "cluster.gpus": "cluster.num_workers",
    "training.epoch": "training.epochs",
    "model.layers": "model.num_layers",
    "memory_profil": "memory_profile",
}


def test_the_key_that_was_meant_is_found():
    for typed, meant in MEANT.items():
        group = [key for key in all_keys() if key.startswith(meant.partition(".")[0] + ".")]
        assert (closest(typed, all_keys()), closest(typed, group or all_keys())) == (meant, meant), typed


def test_an_argument_of_a_data_set_is_found():
    assert closest("path", ["root", "download", "image_size"]) == "root"
    assert closest("+offload._target_", ["offload.target"]) == "offload.target"


def test_nothing_is_guessed_of_a_word_that_is_like_none():
    assert [typed for typed in ("bogus", "foo", "x", "") if closest(typed, all_keys()) is not None] == []
