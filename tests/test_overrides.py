"""Equal spellings of an override mean the same, in each command; what Hydra would read otherwise is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError, conf_dir
from fsdp_lab.config.overrides import read_overrides, search_path

SPELLINGS = {
    "sharding=root": [
        "sharding=choice(root)", "sharding='root'", 'sharding="root"', "+sharding=root", "++sharding=root",
        "sharding@sharding=root", "sharding= root", "sharding=glob(roo*)", "sharding=sort(root)", "sharding=str(root)",
    ],
    "model=lm_tiny,llama3_1b": [
        "model=choice(lm_tiny,llama3_1b)", "model='lm_tiny','llama3_1b'", "model= lm_tiny , llama3_1b",
        "+model=lm_tiny,llama3_1b", "model=choice('lm_tiny',llama3_1b)", "model=tag(x,choice(lm_tiny,llama3_1b))",
        "model=sort(llama3_1b,lm_tiny,reverse=true)",
    ],
    "sharding=per_block,per_layer": ["sharding=glob(per_*)", "sharding=sort(per_layer,per_block)"],
    "training.epochs=3": [
        "training.epochs=choice(3)", "+training.epochs=3", "++training.epochs=3", "training.epochs=range(3,4)",
        "training.epochs= 3", "training.epochs=shuffle(choice(3))",
    ],
    "model.width=8": ["+model.width=8", "++model.width=8", "model.width=choice(8)"],
    "tracking.experiment='1e3'": ["tracking.experiment=1e3", "+tracking.experiment='1e3'"],
    "tracking.experiment='1_0'": ["tracking.experiment=1_0"],
    "tracking.experiment=int(5)": ["+tracking.experiment=int(5)"],
    "hydra.sweep.dir='1e3'": ["hydra.sweep.dir=1e3"],
    "tracking.experiment='true'": ["tracking.experiment=true"],
    "optimizer='0.1'": ["optimizer=0.1", "optimizer=choice(0.1)"],
    "experiment=null": ["+experiment=null", "experiment= null"],
}  # fmt: skip


@pytest.mark.parametrize("canonical", SPELLINGS)
def test_equal_spellings_are_read_alike(canonical: str):
    assert [read_overrides([word]) for word in SPELLINGS[canonical]] == [[canonical]] * len(SPELLINGS[canonical])
    assert read_overrides([canonical]) == [canonical], "also when it is read again, by a resume"


def test_what_is_text_already_is_left_as_it_is_typed():
    """So that commands which are printed later read like the one that was typed."""
    words = ["optimizer.lr=1e-3,1e-2", "training.seed=range(1,4)", "model.table={a:1},{b:2}", "resume=007",
        "objective=[val/loss:min]", "~model.width", "+own_group=a", "model.rate=tag(log,interval(1e-4,1e-2))",
        "cluster.storage_path=null", "forecast.keep=5", "forecast.device=5,6",
        "tracking.experiment=5"]  # fmt: skip
    assert read_overrides(words) == words


def test_a_name_of_an_option_in_other_letters_is_quoted(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "介.yaml").touch()
    assert read_overrides(["model=glob(?)"], str(tmp_path)) == read_overrides(["model='介'"]) == ["model='介'"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("optimizer.lr=1e-3,1e-2 optimizer.lr=1e-1", "optimizer.lr is there 2 times"),
        ("optimizer.lr=1e-1 ++optimizer.lr=choice(1e-3,1e-2)", "optimizer.lr is there 2 times"),
        ("sharding=root +sharding=glob(per_*)", "sharding is there 2 times"),
        ("experiment=zero2_zero3,precision_and_offload", "a command takes one"),
        ("experiment=glob(*)", "a command takes one"),
        ("+experiment=nightly,null", "a command takes one"),
        ("sharding@other=root", "leave out @other"),
        ("~sharding", "every trial has an option of sharding"),
        ("~model=vit_tiny", "every trial has an option of model"),
        ("sharding=[root]", "sharding is a group"),
        ("sharding=root,{a:1}", "sharding is a group"),
        ("sharding=null", "sharding is a group"),
        ("sharding=interval(0,1)", "sharding is a group"),
        ("tracking.experiment=1e3,1e4", "quote text"),
        ("model.table={1:a}", "keys are text"),
        ("model.table=[{a:[{true:1}]}],2", "keys are text"),
        ("optimizer=choice(1e3,adam)", "quote text"),
        ("sharding.granularity=root", "use sharding=<option>"),
        ("hydra.searchpath=[file://mine]", "--config-dir"),
        ("hydra/launcher=joblib", "engine=inline"),
        ("+hydra/sweeper=basic", "search=grid"),
        ("report sweep=last", "python -m fsdp_lab.report"),
        ("doctr", "Did you mean doctor?"),
        ("sharding", "Did you mean sharding=...?"),
    ],
)
def test_what_would_be_read_otherwise_is_refused_with_the_way_out(words: str, names: str):
    with pytest.raises(ConfigError) as caught:
        read_overrides(words.split())
    assert names in str(caught.value)


def test_keys_that_are_there_twice_without_being_swept_have_the_last_value():
    """As in Hydra: scripts put the user's words behind their own."""
    assert read_overrides(["optimizer.lr=1", "optimizer.lr=2"]) == ["optimizer.lr=1", "optimizer.lr=2"]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("optimizer/adam.yaml", "has the name of one of fsdp_lab's own files"),
        ("experiment/nightly.yaml", "has the name of one of fsdp_lab's own files"),
        ("config.yaml", "has the name of one of fsdp_lab's own files"),
        ("device/h200.yaml", "has the name of one of fsdp_lab's own files"),
        ("model/mine.yml", r"would be ignored.* mine\.yaml"),
        ("model/mine.YAML", r"would be ignored.* mine\.yaml"),
    ],
)
def test_a_file_of_the_users_that_would_be_ignored_is_named(tmp_path: Path, file: str, says: str):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("lr: 0.5\n")
    with pytest.raises(ConfigError, match=f"{tmp_path / file} {says}"):
        search_path(str(tmp_path))


def test_a_copy_of_our_files_and_others_beside_them_are_taken(tmp_path: Path):
    for file in ("model/mlp.yaml", "config.yaml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((conf_dir() / file).read_bytes())
    for name in ("model/mine.yaml", "model/notes.md", "ci.yml"):
        (tmp_path / name).touch()
    assert search_path(str(tmp_path)) == [f"hydra.searchpath=['file://{tmp_path}']"]
