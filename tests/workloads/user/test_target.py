"""What a `_target_` may be: every wrong one is refused with the reason and what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_lab.config import ConfigError
from fsdp_lab.config.code import code_digest, user_packages
from fsdp_lab.config.target import user_root
from tests.ranks import config
from tests.workloads.user.project import importable, write_project

NET = ("model._target_=my_project.net.Net", "model.width=16")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    (folder / "my_project" / "broken.py").write_text("def")
    (folder / "my_project" / "needs.py").write_text("import nowhere_to_be_found")
    with importable(folder):
        yield folder


# What is typed -> what the message must say.
BAD = {
    "no module": (["model._target_=my_projct.net.Net"], ["there is no module my_projct", "Did you mean my_project?"]),
    "no file": (["model._target_=my_project.nte.Net"], ["my_project has no nte", "Did you mean net?"]),
    "no class": (["model._target_=my_project.net.Nte"], ["my_project.net has no Nte", "Did you mean Net?"]),
    "no path": (["model._target_=Net"], ["model._target_=Net is not an import path", "my_project.net.Net"]),
    "a module": (["model._target_=my_project.net.F"], ["F is a module, which cannot be called"]),
    "a number": (["task.loss=my_project.net.a_number"], ["a_number is a int, which cannot be called"]),
    "broken file": (["model._target_=my_project.broken.Net"], ["my_project.broken fails with SyntaxError"]),
    "missing library": (["model._target_=my_project.needs.Net"], ["my_project.needs imports nowhere_to_be_found"]),
    "unknown argument": (
        ["model._target_=my_project.net.Net", "model.widht=4"],
        ["model.widht=4: my_project.net.Net has no parameter widht", "Did you mean width?", "takes: width, depth."],
    ),
    "missing argument": (
        ["model._target_=my_project.net.Net"],
        ["needs model.width, which has no default; add model.width=<value>"],
    ),
    "missing arguments": (
        ["model._target_=torch.nn.Linear"],
        ["needs model.in_features, model.out_features, which have no defaults; add model.in_features=<value>"],
    ),
    "argument of data": (
        ["data._target_=my_project.data.Corpus", "data.nois=1"],
        ["has no parameter nois", "takes: noise."],
    ),
    "no split": (
        ["data._target_=my_project.data.without_split", "data.noise=1"],
        ["has no parameter split", 'calls it with split="train" and then split="val"', "add that param"],
    ),
    "given split": (
        ["data._target_=my_project.data.Corpus", "data.split=train"],
        ["data.split=train: fsdp_lab itself"],
    ),
    "argument of an argument": (
        ["model._target_=my_project.net.Wraps", "model.inner._target_=my_project.net.Net", "model.inner.widht=4"],
        ["model.inner.widht=4: my_project.net.Net has no parameter widht", "Did you mean width?"],
    ),
    "target of an argument": (
        ["model._target_=my_project.net.Wraps", "model.inner=[{_target_: my_project.net.Nte}]"],
        ["model.inner.0._target_=my_project.net.Nte: my_project.net has no Nte"],
    ),
    "word of Hydra's": (
        ["data._target_=my_project.data.Corpus", "data.noise={_target_: my_project.net.loss, _partial_: true}"],
        ["data.noise._partial_: of Hydra's special keys only _target_ is supported"],
    ),
    "no target": (["model=custom"], ["model=custom: model._target_ is not set"]),
    "no loss": (["task=custom"], ["task=custom with task.loss=null"]),
    "two losses": (["task=model_loss", "task.loss=my_project.net.loss"], ["task=model_loss with task.loss=my_project"]),
    "loss of one": (
        [*NET, "task.loss=my_project.net.loss_of_the_model_alone"],
        ["takes (model), but is called as loss_of_the_model_alone(model, batch)"],
    ),
    "loss class": (
        [*NET, "task.loss=torch.nn.CrossEntropyLoss"],
        ["task.loss=torch.nn.CrossEntropyLoss is a class; give a function that takes the model and a batch"],
    ),
    "block": ([*NET, "model.block_classes=[my_project.net.Blok]"], ["has no Blok", "Did you mean Block?"]),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_called_is_refused(project: Path, words: list[str], message: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*words).check(1)
    assert [word for word in message if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_the_digest_is_of_the_files_of_the_users_packages(project: Path) -> None:
    """Any file of them: one that is changed, new, renamed or gone; not of the installed ones, which have versions."""
    named = ["my_project.net.Net", "my_project.data.Corpus", "torch.nn.Linear", "fsdp_lab.compose.check"]
    assert user_packages(named) == ["my_project"]
    assert user_root("torch.nn.Linear") is None and user_root("fsdp_lab.compose.check") is None
    digests, data = [code_digest(["my_project"])], project / "my_project/data.py"
    data.write_text(data.read_text() + "# other\n")
    digests.append(code_digest(["my_project"]))
    data.rename(data.with_name("renamed.py"))
    digests.append(code_digest(["my_project"]))
    (project / "my_project/.hidden.py").touch()
    assert code_digest(["my_project"]) == digests[-1]
    data.with_name("renamed.py").unlink()
    assert len({*digests, code_digest(["my_project"]), code_digest([])}) == 5
