"""Converts errors that the command line caused to messages for users."""

from __future__ import annotations

import errno
import re
import sys

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from fsdp_lab.config import NightlyConfig, UserError, flatten
from fsdp_lab.config.describe import valid_keys
from fsdp_lab.config.key import keys_of
from fsdp_lab.config.options import options_of
from fsdp_lab.config.suggest import did_you_mean
from fsdp_lab.config.words import split_config_dir

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
_HYBRID = "any of them but ddp with sharding.dp_replicate=<number of replicas>"
_SHARDINGS = {  # what PyTorch and DeepSpeed call them
    "fsdp": "any of them but ddp",
    "fsdp1": "any of them but ddp with sharding.api=fsdp1",
    "fsdp2": "any of them but ddp",
    "full_shard": "sharding=per_block reshard_after_forward=always",
    "zero3": "sharding=per_block reshard_after_forward=always",
    "shard_grad_op": "sharding=per_block reshard_after_forward=never",
    "zero2": "sharding=per_block reshard_after_forward=never",
    "no_shard": "sharding=ddp",
    **dict.fromkeys(("hybrid", "hybrid_shard", "hsdp"), _HYBRID),
}
_REMEDIES = {
    "to Float": "; use a number such as {example}",
    "to Integer": "; use a whole number",
    "bool": "; use true or false",
}


def explain(error: BaseException, folder_key: str = "hydra.run.dir (hydra.sweep.dir with -m)") -> str | None:
    """Return the message for an error that the command line caused; None for any other error.

    Args:
        folder_key: sets the folder that the command writes to.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error.__cause__, UserError):  # OmegaConf wraps our message
        return str(error.__cause__)
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        reason = re.sub(r"See https.*", "", one_line(str(error))).strip()
        key = str(error.override).partition("=")[0]
        if not re.fullmatch(r"[!-~]+", key):
            return f"{error.override}: what is before the = is no key; write key=value, without spaces."
        if refused := re.search(r"LexerNoViableAltException: (.*)\n( *)\^", str(error)):
            unread = refused[0][len(refused[2])] if len(refused[2]) < len(refused[0]) else ""
            if unread.strip() and unread not in "=()[]{},'\"":
                return f"{error.override}: Hydra reads no {unread} without quotes; write '{key}=\"...\"'."
        if str(error.override).endswith(","):
            return (
                f"{error.override} ends with a comma: the shell cut it at a space. Remove the spaces, or put the whole "
                "override in quotes."
            )
        return (
            f"{error.override}: {reason}. Quote a value that contains =, commas or brackets, as in '{key}=\"...\"', "
            f"and close every bracket, as in '{key}=choice(1,2)'."
        )
    if isinstance(error, OSError) and error.filename:
        if error.errno in _NO_FILE:
            return f"{error.filename}: {error.strerror}."
        if error.errno in _UNWRITABLE:
            return (
                f"{error.filename}: {error.strerror}. Nothing can be written there: free the disk, or set {folder_key} "
                "to a folder that can be written."
            )
    if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
        return (
            f"{error.object[:200].encode(errors='backslashreplace').decode()} has letters that this locale does not "
            "have, so no file can hold it; rename that folder, or set LC_ALL=C.UTF-8."
        )
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        where = f"{error.problem_mark.name}:{error.problem_mark.line + 1}"
        return f"{where} is not valid YAML: {error.problem}. Indent with spaces, and quote special characters."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _composition(error)
    return None


def _missing_option(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
    options = options_of(group, split_config_dir(sys.argv[1:])[0]) or list(error.options or ())
    if not options:
        return one_line(str(error))
    choose = f"{did_you_mean(option, options)}Choose one of: {', '.join(options)}"
    if group == "sharding" and (meant := _SHARDINGS.get(option.lower().replace("-", "_"))):
        choose += f"; {option} is {meant}"
    return f"{group}={option} is not an option. {choose}."


def _composition(error: BaseException) -> str:
    text = one_line(str(error))
    cause = one_line(str(error.__cause__)) if error.__cause__ else ""
    if match := re.search(r"Environment variable '([^']+)' not found", text + cause):
        return f"the environment variable {match[1]} is not set where this runs; export it first."
    if match := re.search(r"Could not override '(\w+)@experiment\.", text):
        return (
            f"the preset sets {match[1]} inside its own group: start it with `# @package _global_`, and write "
            f"`override /{match[1]}: ...` in its defaults."
        )
    if match := re.search(r"In 'experiment/([^']+)': .* Key 'experiment' not in", text):
        return f"experiment={match[1]}: the preset sets keys inside its own group; start it with `# @package _global_`."
    if match := re.search(r"In 'experiment/([^']+)': .*'ListConfig' to string: '\[(.*)\]' full_key: (\S+)", text):
        values = match[2].replace("'", "").replace(", ", ",")
        return f"experiment={match[1]}: {match[3]} is a list, and an axis is text; write {values} without brackets."
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1]
        if "No match in the defaults list" in text:
            return f"{key} is not a key or a group. {valid_keys(key)}"
        if "not in" in cause or "Key" in cause:
            return f"{key} is not a key. {valid_keys(key)}"
    if match := re.search(r"Error merging override ([^=]+)=(\S*)", text):
        return wrong_value(match[1], match[2], cause)
    if "Ambiguous value for argument" in text and any(word.startswith("resume=") for word in sys.argv):
        given = re.search(r"argument '([^']+)'", text)
        return (
            f"{given[1] if given else 'an override'} has several values; a resumed sweep keeps its axes, so leave it "
            "out."
        )
    if "Ambiguous value for argument" in text or "requires --multirun" in text:
        given = re.search(r"(?:argument|parameters) '([^']+)'", text)
        return (
            f"{given[1] if given else 'an override'} has several values, which needs a sweep: add -m to run one trial "
            "for each, or give one value; --cfg and --info show one trial."
        )
    return _cut(f"{text} {cause}".strip())


def wrong_value(key: str, value: str, cause: str) -> str:
    """Return the message for a value that OmegaConf refused.

    Args:
        value: as typed.
        cause: OmegaConf's message.
    """
    if match := re.search(r"expected one of \[(.*?)\]", cause):
        values = match[1].split(", ")
        return f"{key}={value} is not one of its values. {did_you_mean(value, values)}Use one of: {', '.join(values)}."
    remedy = next((r for kind, r in _REMEDIES.items() if kind in cause), "").format(example=_example(key))
    if not value:
        remedy += "; it is empty: put a value with a $ into single quotes, or the shell expands it"
    return f"{key}={value}: {_cut(cause).rstrip('.')}{remedy}."


def _example(key: str) -> str:
    """Return a number that is valid for a key: its default, or the example of its field."""
    known, default = keys_of(NightlyConfig).get(key), flatten(NightlyConfig()).get(key)
    value = default if default is not None or known is None else known.example
    return f"{value:g}" if isinstance(value, int | float) else "0.001"


def one_line(text: str) -> str:
    """Return a text with white space collapsed to single spaces."""
    return " ".join(text.split())


def _cut(text: str) -> str:
    return re.sub(r"\s*(full_key|reference_type|object_type)[:=].*", "", text)
