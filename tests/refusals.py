"""Every refusal of a command line, as a table: what is typed, and the key and value that the message must name.

`python -m tests.refusals` writes the whole messages into `tests/messages.txt` anew: look at what has changed there.
The tests are in `tests/test_refusals.py`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

from fsdp_lab.config import ConfigError
from fsdp_lab.config.checks import check_keys
from fsdp_lab.machine import hardware

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("messages.txt")
PASSWORD = "pass4711"  # each one in the table: no message repeats it
SLOW = ("ray", "torch", "mlflow")  # no refusal of the table imports them, but for `_DATA`
COMMANDS = TRIAL, FORECAST, SWEEP = "fsdp_lab", "fsdp_lab.forecast", "fsdp_lab -m"
_ONE_CELL = ("sharding=per_block", "precision=fp32", "offload=none", "reshard_after_forward=always")
# What is in the folder of each command: a user's options that lack something, a project, and files of data.
_FILES = {
    "mine/task/tab.yaml": "loss: a.b\n\tunit: samples\n",
    "mine/experiment/no_package.yaml": "defaults:\n  - override /model: mine\n",
    "mine/experiment/no_override.yaml": "# @package _global_\nmodel:\n  _target_: fractions.Fraction\n  width: 4\n",
    "my_project/__init__.py": "",
    "my_project/broken.py": "def",
    "my_project/needs.py": "import nowhere_to_be_found",
    "my_project/net.py": """
import math as F

a_number = 3

class Block: pass

class Net:
    def __init__(self, width, depth=2): pass

class Wraps:
    def __init__(self, inner, others=()): pass

class Linear:
    def __init__(self, rows, columns): pass

class Summariser:
    def __init__(self, vocab_size=384): pass

class Corpus:
    def __init__(self, split, noise=0.0): pass

class Loss:
    def __init__(self, weight=None): pass

def without_split(noise): pass
def loss(model, batch): pass
def loss_of_the_model_alone(model): pass
""",
    "columns/wikihowAll.csv": "title,summary,text\n",
    "spaces/wikihowAll.csv": "a b\n",
    "nothing/wikihowAll.csv": "\n",
}

_BY_EACH = """
sharding=foo                            | sharding=foo
shardin=root                            | shardin sharding
optimizer.rate=0.1                      | optimizer.rate optimizer.lr
optimizer.learning_rate=1               | optimizer.learning_rate optimizer.lr
training.lr=1                           | training.lr optimizer.lr
bogus.key=1                             | bogus.key
+nonsense=1                             | nonsense
+training.epoch=5                       | training.epoch training.epochs
+offload._target_=my.Net                | offload._target_ offload.target
objective=3                             | objective=3
objective=val/loss                      | objective=val/loss
objective=val_loss:min                  | objective=val_loss:min val/loss
precision=16                            | precision=16 bf16_mixed
offload=null                            | offload=null cpu_unpinned
data=[1,2]                              | data=[1,2] digits
sharding={a:1}                          | sharding={a:1} per_block
experiment=nope                         | experiment=nope ray_template
model.hidden_dim=9223372036854775808    | model.hidden_dim=9223372036854775808
optimizer.lr=abc                        | optimizer.lr=abc
optimizer.lr=-1                         | optimizer.lr=-1
forecast.capacity_gib=lots              | forecast.capacity_gib=lots
training.epochs=two                     | training.epochs=two
training.epochs=0                       | training.epochs=0
training.epochs                         | training.epochs
training.seed=choice(1,2                | training.seed=choice(1,2
training.seed=1,                        | training.seed=1, comma
training.seed=range(1,2,3,4)            | training.seed=range(1,2,3,4)
training.global_batch_size=63           | training.global_batch_size=63 cluster.num_workers=2
compile=maybe                           | compile=maybe
init=foo                                | init=foo rank0 meta
sharding.dp_replicate=3                 | sharding.dp_replicate=3 cluster.num_workers=2
sharding=size_based                     | sharding=size_based sharding.min_num_params=null
sharding=ddp offload=cpu                | sharding=ddp offload=cpu
reshard_after_forward=to_size           | reshard_after_forward.size=null
reshard_after_forward=to_size reshard_after_forward.size=3 | reshard_after_forward.size=3
cluster=adress                          | cluster=adress address
--config-dir=mine task=tab              | mine/task/tab.yaml:2
--config-dir=mine experiment=no_package | @package /model
--config-dir=mine experiment=no_override | fractions.Fraction /model
"""
_CODE = """
model._target_=my_projct.net.Net        | model._target_=my_projct.net.Net my_project
model._target_=my_project.nte.Net       | model._target_=my_project.nte.Net
model._target_=my_project.net.Nte       | model._target_=my_project.net.Nte
model._target_=Net                      | model._target_=Net my_project.net.Net
model._target_=my_project.net.F         | model._target_=my_project.net.F
task.loss=my_project.net.a_number       | task.loss=my_project.net.a_number
model._target_=my_project.broken.Net    | my_project.broken SyntaxError
model._target_=my_project.needs.Net     | my_project.needs nowhere_to_be_found
model._target_=my_project.net.Net model.widht=4 | model.widht=4 width depth
model._target_=my_project.net.Net       | model.width=<value>
model._target_=my_project.net.Linear    | model.rows model.columns model.rows=<value>
model._target=my_project.net.Net        | model._target=my_project.net.Net _target_
model.num_layer=4                       | model.num_layer=4 num_layers
model.num_layers=many                   | model.num_layers=many
data._target_=my_project.net.Corpus data.nois=1 | data.nois=1 noise
data._target_=my_project.net.without_split data.noise=1 | without_split split
data._target_=my_project.net.Corpus data.split=train | data.split=train
model._target_=my_project.net.Wraps model.inner._target_=my_project.net.Net model.inner.widht=4 | model.inner.widht=4
'model.inner=[{_target_: my_project.net.Nte}]' model._target_=my_project.net.Wraps | model.inner.0._target_
'data.noise={_target_: my_project.net.loss, _partial_: true}' data._target_=my_project.net.Corpus | data.noise._partial_
model=custom                            | model=custom model._target_
task=custom                             | task=custom task.loss=null
task=model_loss task.loss=my_project.net.loss | task=model_loss task.loss=my_project.net.loss
task.loss=my_project.net.loss_of_the_model_alone | loss_of_the_model_alone(model, batch)
task.loss=my_project.net.Loss           | task.loss=my_project.net.Loss
model.block_classes=[my_project.net.Blok] model._target_=my_project.net.Net model.width=4 | my_project.net Blok
task=language model=mlp data._target_=my_project.net.Corpus | task=language data=digits data=pydoc
--config-dir=nowhere model=mine         | nowhere
--config-dir=mine model=mien            | model=mien vit_tiny
"""
_UNLESS_SWEPT = """
optimizer.lr=1e-3,1e-2                  | optimizer.lr=1e-3,1e-2 -m
optimizer.lr=choice(1,2)                | optimizer.lr=choice(1,2) -m
"""
_WHERE_IT_RUNS = """
cluster.num_workers=5000                | cluster.num_workers=5000
data=fashion_mnist data.download=false data.root=nowhere | data.root=nowhere data=digits
nightly.repeats=2                       | nightly.repeats fsdp_lab.nightly
model.num_classes=7                     | model.num_classes=7 model.num_classes=10
"""
_DATA = """
data=synthetic_tokens model=custom      | model.vocab_size
task=classification model=lm_tiny       | data=digits data=pydoc
model=vit_tiny data=pydoc               | data=digits data=pydoc
model=lm_tiny data=digits               | data=digits data=pydoc
task=language model.vocab_size=255      | model.vocab_size=255 model.vocab_size=256
model=llama3_1b data.vocab_size=128257  | model.vocab_size=128256 data.vocab_size=128257
model._target_=my_project.net.Summariser data=wikihow data.root=nowhere | data.root=nowhere wikihowAll.csv
model._target_=my_project.net.Summariser data=wikihow data.root=columns | columns/wikihowAll.csv headline
model._target_=my_project.net.Summariser data=wikihow data.root=spaces | spaces/wikihowAll.csv headline
model._target_=my_project.net.Summariser data=wikihow data.root=nothing | nothing/wikihowAll.csv headline
model._target_=my_project.net.Summariser data=pydoc_summaries task=classification | task=classification
model._target_=my_project.net.Summariser data=pydoc_summaries data.target_len=1 | data.target_len=1
model._target_=my_project.net.Summariser data=pydoc_summaries data.tokenizer=no.json | data.tokenizer=no.json
model._target_=my_project.net.Summariser data=pydoc_summaries model.vocab_size=300 | model.vocab_size=300 384
"""
_BY_FORECASTS = """
forecast.largest_microbatch=true        | forecast.largest_microbatch=true forecast.capacity_gib=24
"""
_BY_A_TRIAL = """
hydra.run.dir=/proc/nope/x              | /proc/nope
tracking.uri=http://me:pass4711@host     | tracking.uri MLFLOW_TRACKING_PASSWORD
resume=s3://me:pass4711@bucket/x        | resume
resume=last                             | resume=last
resume=nowhere                          | resume=nowhere
resume=mine                             | sweep.json
repeats=3                               | repeats=3 -m
resume=a,b                              | resume=a,b
--config-name=mine                      | --config-name --config-dir
-cp mine                                | -cp --config-dir
--config-d=mine                         | --config-d --config-dir
--sharding root                         | --sharding sharding=
forecast sharding=root                  | fsdp_lab.forecast
tracking.experiment=介绍                | tracking.experiment=介绍
=介绍                                   | =介绍
--keys cluster.num_worker_              | cluster.num_worker_ cluster.num_workers
doctor tracking.url=x                   | tracking.url
--multirun optimizer.lr=interval(0,1) training.epochs=1 | optimizer.lr=interval(0,1)
optimizer.lr=interval(0,1) -m training.epochs=1         | optimizer.lr=interval(0,1)
optimizer.lr=interval(0,1) training.epochs=1 --multirun | optimizer.lr=interval(0,1)
"""
_BY_A_SWEEP = """
optimizer.lr=interval(0,1)              | optimizer.lr=interval(0,1)
+training.epoch=1,5                     | training.epoch training.epochs
precision=16,32                         | precision=16 bf16_mixed
experiment=zero2_zero3,nightly          | experiment=zero2_zero3,nightly
optimizer.lr=1,2 +optimizer.lr=3        | optimizer.lr=1,2
repeat=choice(3)                        | repeat=3 repeats=3
hydra.job.chdir=true                    | hydra.job.chdir hydra.sweep.dir
training.epochs=1,0                     | training.epochs=0
repeat=3                                | repeat=3 repeats=3
++repeat=1                              | repeat=1 repeats=2
repeats=3 search=random                 | repeats=3
repeats=3 repeat=0,1                    | repeats=3 repeat
repeats=2,3                             | repeats=2,3
search=random optimizer.lr=interval(0.5,0.1)         | optimizer.lr=interval(0.5,0.1)
search=random "optimizer.lr=tag(log,interval(0,1))"  | optimizer.lr
search=random "optimizer.lr=tag(loud,interval(1,2))" | loud
search=random optimizer.lr=0.1          | interval
sharding=ddp offload=cpu,cpu_unpinned   | offload=cpu offload=cpu_unpinned
sharding=ddp,root training.global_batch_size=63 | training.global_batch_size=63
sharding=ddp,root sharding.dp_replicate=3 | sharding.dp_replicate=3
hydra.sweep.dir=/proc/nope/x            | hydra.sweep.dir=/proc/nope/x
hydra.sweep.dir=j hydra.sweep.subdir=.  | hydra.sweep.subdir hydra.job.num
hydra.sweep.dir=j hydra.sweep.subdir=one search=random optimizer.lr=1,2 | hydra.sweep.subdir hydra.job.num
hydra.sweep.dir=j hydra.sweep.subdir=one training.epochs=1,2 | hydra.sweep.subdir hydra.job.num
forecast.prune=true                     | forecast.prune=true forecast.capacity_gib=24
forecast.prune=true forecast.capacity_gib=1 forecast.enabled=false | forecast.prune=true forecast.enabled=true
forecast.prune=true forecast.device=h200       | forecast.prune=true forecast.device=h200
forecast.keep=5                         | forecast.keep=5 forecast.device
forecast.keep=5 forecast.device=mi300x  | forecast.keep=5 forecast.device=mi300x
"""

# The rules between keys, which need no command: each number has a range, and settings without a meaning are refused.
# A grid leaves such settings out; a number out of its range it refuses.
_BELOW_ONE = """
model.image_size model.num_channels model.patch_size model.num_layers model.num_heads model.hidden_dim model.mlp_dim
model.num_classes data.num_train data.num_val training.epochs training.max_steps training.global_batch_size
training.grad_accum_steps sharding.dp_replicate sharding.min_num_params reshard_after_forward.size
checkpoint.every_epochs checkpoint.keep_last cluster.num_workers precision.growth_interval lr_schedule.step_epochs
"""
_OUT_OF_RANGE = """
data.loader_workers=-1 training.timing_warmup_steps=-2 training.seed=-1 optimizer.weight_decay=-0.1
optimizer.momentum=-0.5 lr_schedule.warmup_steps=-1 lr_schedule.min_lr_ratio=-0.2 cluster.max_failures=-1
sharding.forward_prefetch=-1 sharding.backward_prefetch=-3 optimizer.lr=0.0 optimizer.lr=-0.1 optimizer.lr=inf
optimizer.lr=nan training.max_grad_norm=0.0 precision.init_scale=0.0 cluster.cpus_per_worker=0.0
forecast.capacity_gib=0.0 forecast.capacity_gib=-1.0
cluster.wait_timeout_s=-1.0 lr_schedule.gamma=0.0 optimizer.beta1=1.0 optimizer.beta2=1.5 optimizer.beta1=-0.1
"""
_MISSING = """
model.num_heads=null                    | model.num_heads=null
model.patch_size=null                   | model.patch_size=null
model.mlp_dim=null                      | model.mlp_dim=null
forecast.device=a10080                  | forecast.device=a10080 a100_80gb
forecast.device=tpu                     | forecast.device=tpu auto cpu cuda a100_40gb
forecast.device=mine/gpu.yaml           | forecast.device=mine/gpu.yaml
forecast.keep="'0'"                     | forecast.keep=0
forecast.keep=0%                        | forecast.keep=0% 20%
forecast.keep=some                      | forecast.keep=some
cluster.storage_path=file:///mnt/x      | cluster.storage_path=file:///mnt/x
cluster.storage_path=memory://x         | cluster.storage_path=memory://x s3://bucket/prefix
cluster.storage_path=http://host/x      | cluster.storage_path=http://host/x s3://
cluster.storage_path=s3://bucket/x/     | cluster.storage_path=s3://bucket/x/
cluster.storage_path=s3:///x            | cluster.storage_path=s3:///x
'cluster.storage_path=s3://bucket/x y'  | cluster.storage_path=s3://bucket/x
cluster.storage_path=s3://me:pass4711@bucket/x | cluster.storage_path
'cluster.storage_path="s3://bucket/x?key=pass4711"' | cluster.storage_path
cluster.address=ray://head:10001        | cluster.address=ray://head:10001 cluster.address=<head>:6379
cluster.address=http://head:8265        | cluster.address=http://head:8265 cluster.address=<head>:6379
cluster.address=https://head:8265       | cluster.address=https://head:8265 cluster.address=<head>:6379
"""
_WITHOUT_MEANING = """
model.patch_size=5                      | model.patch_size=5 model.image_size=28
model.num_heads=3                       | model.num_heads=3 model.hidden_dim=64
sharding=ddp offload=cpu_unpinned       | sharding=ddp offload=cpu_unpinned offload=none
sharding=ddp sharding.dp_replicate=2    | sharding=ddp sharding.dp_replicate=1
sharding=ddp sharding.forward_prefetch=1  | sharding.forward_prefetch=1 sharding.forward_prefetch=null
sharding=ddp sharding.backward_prefetch=1 | sharding.backward_prefetch=1 sharding.backward_prefetch=null
sharding=ddp sharding.blocks_per_unit=2 | sharding.blocks_per_unit=2 sharding=ddp
sharding=root sharding.blocks_per_unit=3 | sharding.blocks_per_unit=3 sharding=root sharding.blocks_per_unit=1
sharding=ddp sharding.separate_reduce_scatter_group=true | sharding=ddp sharding.separate_reduce_scatter_group=false
sharding=per_layer activation_checkpointing=selective | sharding=per_layer activation_checkpointing=selective
precision.float8=true                   | precision.float8=true precision=float8
precision.tf32=true precision.param_dtype=bfloat16 | precision.tf32=true precision.param_dtype=bfloat16 precision=tf32
task.loss_chunks=4                      | task.loss_chunks=4 task=classification
checkpoint.export_best=true checkpoint.mode=off | checkpoint.export_best=true checkpoint.mode=off
checkpoint.mode=sync checkpoint.export_best=true checkpoint.keep_best=false | \
    checkpoint.export_best=true checkpoint.keep_best=false
optimizer.momentum=0.9                  | optimizer.momentum=0.9 optimizer=adam optimizer=sgd
optimizer=sgd optimizer._target_=fractions.Fraction | optimizer._target_=fractions.Fraction optimizer=sgd custom
optimizer=sgd optimizer.implementation=fused | optimizer.implementation=fused optimizer=sgd foreach
optimizer.implementation=fused precision.loss_scaling=true precision.param_dtype=float16 | \
    optimizer.implementation=fused precision.loss_scaling=true
precision.loss_scaling=true precision.param_dtype=bfloat16 | precision.loss_scaling=true precision.param_dtype=bfloat16
search=random forecast.device=h100_sxm forecast.keep="'5'" | search=random forecast.keep=5
cluster.num_workers=1 engine=inline forecast.device=h100_sxm forecast.keep="'5'" | engine=inline forecast.keep=5
cluster.num_workers=8 sharding.dp_replicate=3 | sharding.dp_replicate=3 cluster.num_workers=8
cluster.num_workers=2 training.global_batch_size=65 | training.global_batch_size=65 cluster.num_workers=2
cluster.num_workers=4 training.global_batch_size=30 training.grad_accum_steps=2 | \
    training.global_batch_size=30 training.grad_accum_steps=2
cluster.num_workers=4 training.global_batch_size=3 | training.global_batch_size=3
cluster.num_workers=4 reshard_after_forward=to_size reshard_after_forward.size=3 | reshard_after_forward.size=3
cluster.num_workers=4 reshard_after_forward=to_size reshard_after_forward.size=4 sharding.dp_replicate=2 | \
    reshard_after_forward.size=4 cluster.num_workers=4 sharding.dp_replicate=2
"""


@dataclass(frozen=True)
class Refusal:
    """A row of the table.

    Attributes:
        words: as they are typed; variables of the environment come first.
        names: what the message must contain.
        commands: those that refuse the words, with the same message.
        imports: the slow libraries that reading the data takes.
    """

    words: str
    names: list[str]
    commands: tuple[str, ...]
    imports: tuple[str, ...] = ()


def refusals() -> Iterator[Refusal]:
    """Give every row that commands refuse."""
    yield from _rows(_BY_EACH, TRIAL, FORECAST, SWEEP)
    yield from _rows(_CODE, TRIAL, FORECAST, SWEEP)
    yield from _rows(_UNLESS_SWEPT, TRIAL, FORECAST)
    yield from _rows(_WHERE_IT_RUNS, TRIAL, SWEEP)
    yield from _rows(_BY_FORECASTS, FORECAST, SWEEP)
    yield from _rows(_BY_A_TRIAL, TRIAL)
    yield from _rows(_BY_A_SWEEP, SWEEP)
    yield from (replace(row, imports=("torch",)) for row in _rows(_DATA, TRIAL))  # the last: no other imports it


def rules() -> Iterator[Refusal]:
    """Give every row that a rule between the keys refuses, in whichever command."""
    words = [f"{key}=0" for key in _BELOW_ONE.split()] + _OUT_OF_RANGE.split()
    yield from (Refusal(word, [word], (FORECAST,)) for word in words)
    yield from _rows(_MISSING, FORECAST)


def combinations() -> Iterator[Refusal]:
    """Give every row of settings that have no meaning together: a grid leaves them out."""
    yield from _rows(_WITHOUT_MEANING, FORECAST)


def _rows(table: str, *commands: str) -> Iterator[Refusal]:
    for row in table.strip().splitlines():
        words, _, names = row.partition("|")
        yield Refusal(" ".join(words.split()), names.split(), commands)


@dataclass(frozen=True)
class Answer:
    """What a command answered.

    Attributes:
        words: those of the row.
        command: which command.
        status: its exit status.
        out: what it printed.
        message: its errors, without the name of the command, and without what differs between machines.
        imported: the slow libraries that were imported by then.
        left: what a sweep or a forecast left in its folder. Hydra makes that of a trial.
    """

    words: str
    command: str
    status: int
    out: str
    message: str
    imported: list[str]
    left: list[str]


def answers(rows: Iterable[Refusal], commands: Sequence[str]) -> list[Answer]:
    """Return what those of a row's commands answer, one after another in a process that has imported nothing."""
    asked = [(row.words, command) for row in rows for command in row.commands if command in commands]
    done = subprocess.run(
        [sys.executable, "-m", "tests.refusals", "--answer"],
        input=json.dumps(asked), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=500, check=True,
    )  # fmt: skip
    return [Answer(**answer) for answer in json.loads(done.stdout)]


def _answer_all(asked: Sequence[Sequence[str]]) -> Iterator[Answer]:
    """Answer in this process, as on a machine with 64 cores, without GPUs."""
    with ExitStack() as patched:
        patched.enter_context(mock.patch.multiple(hardware, num_cpus=lambda: 64, num_gpus=lambda: 0))
        folder = patched.enter_context(tempfile.TemporaryDirectory())
        patched.enter_context(chdir(folder))
        for name, text in _FILES.items():
            file = Path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        os.environ["PATH"] = folder
        sys.path.insert(0, folder)  # as `python -m` has it
        for words, command in asked:
            yield _answer(words, command)
            shutil.rmtree("outputs", ignore_errors=True)


def _answer(words: str, command: str) -> Answer:
    """Let a command run, but for the training and the forecasting that would follow."""
    from hydra.core.global_hydra import GlobalHydra

    from fsdp_lab.commands import forecast as forecast_command
    from fsdp_lab.commands import main as trial_command

    main: Callable[[], int | None] = forecast_command.main if command == FORECAST else trial_command.main
    variables, typed = _typed(words, command)
    GlobalHydra.instance().clear()
    folder, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [command, *typed]),
        mock.patch.dict(os.environ, variables),
        mock.patch("fsdp_lab.sweep.start.start_sweep", return_value=0),
        mock.patch.object(forecast_command, "run", return_value=0),
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(folder),
    ):
        try:
            status = main() or 0
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:  # noqa: BLE001 - a bug, which Python would show so
            traceback.print_exc()
            status = 1
    message = err.getvalue().removeprefix(f"{command.removesuffix(' -m')}: ").replace(folder, "<folder>")
    left = [] if command == TRIAL else sorted({*os.listdir()} - {name.partition("/")[0] for name in _FILES})
    return Answer(words, command, status, out.getvalue(), message, [name for name in SLOW if name in sys.modules], left)


def _typed(words: str, command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the arguments. A sweep is of one cell, instead of the 36 of the default axes."""
    typed = shlex.split(words)
    variables = [word for word in typed if re.match("[A-Z_]+=", word)]
    typed = typed[len(variables) :]
    if command == SWEEP:
        groups = [word.lstrip("+").partition("=")[0].partition(".")[0] for word in typed]
        typed = [*typed, *(word for word in _ONE_CELL if word.partition("=")[0] not in groups), "-m"]
    return dict(variable.split("=", 1) for variable in variables), typed


def answer_rule(row: Refusal) -> ConfigError | None:
    """Return what the rules between the keys have against the words of a row, without a command."""
    from tests.ranks import read_config  # it imports PyTorch

    try:
        config = read_config(None, shlex.split(row.words))
        check_keys(config, 2 if config.cluster.num_workers is None else config.cluster.num_workers)
    except ConfigError as error:
        return error
    return None


def messages(given: Iterable[Answer]) -> dict[str, str]:
    """Return the message for each row's words."""
    by_rules = {row.words: str(answer_rule(row)) for row in [*rules(), *combinations()]}
    return {answer.words: answer.message.rstrip() for answer in given} | by_rules


def written(found: Mapping[str, str]) -> str:
    """Return the text of `tests/messages.txt`."""
    return "\n".join(f"$ {words}\n{message}\n" for words, message in found.items())


def whole_messages() -> dict[str, str]:
    """Return the message for each row's words, as `tests/messages.txt` has it."""
    entries = GOLDEN.read_text().removeprefix("$ ").split("\n$ ")
    return {words: message.strip() for words, _, message in (entry.partition("\n") for entry in entries)}


if __name__ == "__main__":
    if sys.argv[1:] == ["--answer"]:
        print(json.dumps([asdict(answer) for answer in _answer_all(json.load(sys.stdin))]))
    else:
        GOLDEN.write_text(written(messages(answers(refusals(), COMMANDS))))
