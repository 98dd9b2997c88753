"""Planted faults: `python -m tests.faults [name ...]` plants each in a copy of the project, and its test must fail.

A fault is a small change of the product that breaks a promise. Rewriting code means rewriting its faults, never
removing them: `tests/test_faults.py` checks that each still applies and that its test exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
MAKE_TEST, MAKE_CI = "not (ci or full or cluster or ui or gpu)", "not (full or cluster or ui or gpu)"


@dataclass(frozen=True)
class Fault:
    """A wrong piece of code, and the test that must notice it."""

    name: str  # what is wrong, as a user would see it
    file: str  # of the product
    right: str  # a piece of its text, which occurs once
    wrong: str  # what replaces it
    test: str  # what pytest selects, relative to `tests/`
    marks: str = MAKE_TEST  # the tier whose cases of the test are run


LEARNS = "training/test_parity.py::test_a_sharded_run_learns_what_one_process_learns"
HOLDS = "training/test_parity.py::test_it_holds_what_was_forecast_to_the_byte"
TRACE = "forecast/test_program.py"
CHECKPOINT = "training/test_checkpoint.py"
ANOTHER = f"{CHECKPOINT}::test_another_run_gives_its_weights_and_optimizer_state"
KEPT = "training/test_model_state.py::test_it_is_resumed_and_exported_as_plain_pytorch_has_it"
PLAIN, OWN_BUFFERS = "training/test_plain.py", "::test_each_rank_has_its_own_buffers_and_labels_weigh_alike"
BATCHES = "workloads/test_user.py::test_a_batch_keeps_its_class_and_counts_in_the_digest"
NO_LOSS = "workloads/test_user.py::test_what_does_not_fit_is_reported_in_one_message"
SYNCED = "sweep/test_kills.py::test_what_a_resume_needs_is_on_the_disk_before_its_name"
TRACKING = "tracking/test_tracking.py"
TRIAL_JSON = "sweep/test_record.py::test_the_first_of_two_outcomes_counts_and_nothing_is_lost"
GATE = "nightly/test_gate.py"
MISSED = "nightly/test_schedule.py::test_missed_nights_run_once_and_a_kill_ends_no_schedule"
PASTED = "report/test_pytorch.py::test_the_pasted_function_trains_as_the_trial"
CONSTRUCTED = "training/test_constructor.py::test_what_a_constructor_made_is_trained_or_refused"
FIRST_BITS = "training/test_constructor.py::test_every_sharding_and_init_starts_from_the_same_bits"
COMPUTES = "training/test_refused_models.py::test_what_computes_something_else_is_refused_by_its_name"
UNSHARDABLE = "training/test_refused_models.py::test_what_cannot_be_sharded_is_refused_by_its_name"
CHANGES_ONCE = "training/test_activation_checkpointing.py::test_what_a_forward_pass_changes_changes_once"
SAME_IMAGES = "training/test_start.py::test_a_step_sees_the_same_images_on_any_number_of_workers"
BEST = "training/test_model_state.py::test_the_weights_of_the_best_epoch_are_exported"
ADDED_UP = "training/test_memory.py::test_gradients_are_added_up_as_in_training"
REFUSES = "test_refusals.py::test_each_command_refuses_at_once_and_names_key_and_value"
RULES = "test_refusals.py::test_rules_name_key_and_value"
ALIKE = "training/test_alike.py::test_what_ranks_made_differently_ends_them_with_its_name"
MADE_ALIKE = "training/test_alike.py::test_values_are_compared_where_they_are_real"
ALIKE_NOTE = "training/test_alike.py::test_buffers_that_each_rank_writes_have_a_note"
FAULTS = (
    # suggestions
    Fault("another trainer's name of an option is compared letter by letter", "fsdp_lab/config/suggest.py",
          "in (leaf, _SYNONYMS.get(leaf))", "== leaf", "config/test_keys.py"),
    # doctor and the Python API
    Fault("a machine on which sweeps fail has the status of one on which they run", "fsdp_lab/commands/doctor.py",
          "        wrong += finding.fails", "        wrong += 0", "test_machine.py"),
    Fault("too little memory for Ray is a note", "fsdp_lab/commands/doctor.py",
          "fails=free < _LEAST_MEMORY", "fails=False", "test_machine.py"),
    Fault("a store that another process holds is said to answer", "fsdp_lab/commands/doctor.py",
          "BEGIN IMMEDIATE", "SELECT 1", "test_machine.py"),
    Fault("an interrupt in a notebook does not reach the sweep", "fsdp_lab/api.py",
          "            process.send_signal(signal.SIGINT)", "            pass", "test_api.py"),
    Fault("a command that refuses its words raises nothing in Python", "fsdp_lab/api.py",
          "not in (ExitCode.finished, ExitCode.failed):", "not in tuple(ExitCode):", "test_api.py"),
    Fault("forecasts that all fail have an empty answer in Python", "fsdp_lab/api.py",
          "    if not result.answers:", "    if False:", "test_api.py"),
    # output
    Fault("a reader that closes the pipe ends the command", "fsdp_lab/machine/output.py",
          "suppress(OSError)", "suppress(ValueError)", "sweep/test_terminal.py::test_a_reader_may_close_the_pipe"),
    # MLflow
    Fault("one refused name costs an epoch's metrics", "fsdp_lab/tracking/writes.py",
          "Metric(stored_name(key),", "Metric(key,",
          f"{TRACKING}::test_long_and_strange_names_and_values_fit_a_strict_database"),
    Fault("a moved store logs to its old place", "fsdp_lab/tracking/store.py",
          "    if there != artifacts and not", "    if there == artifacts and not",
          f"{TRACKING}::test_a_store_that_was_moved_does_not_log_to_its_old_place"),
    Fault("a resume looks for what a folder's name has in braces", "fsdp_lab/config/key_value_args.py",
          r'r"\1\1\\${"', r'r"\1\1${"', "config/test_words.py::test_hydra_reads_what_was_quoted"),
    # training
    Fault("the last unit is left unsharded", "fsdp_lab/training/parallelize.py",
          "        for group in groups:\n            fully_shard(group",
          "        for group in groups[:-1]:\n            fully_shard(group", TRACE),
    Fault("weights are kept where they should be freed", "fsdp_lab/training/parallelize.py",
          "        case ReshardPolicy.always:\n            return True",
          "        case ReshardPolicy.always:\n            return False", TRACE),
    Fault("gradients are reduced in the computation's dtype", "fsdp_lab/training/parallelize.py",
          "else TORCH_DTYPE[precision.reduce_dtype]", "else TORCH_DTYPE[precision.param_dtype]",
          "training/test_parity.py::test_each_precision_does_its_own_arithmetic"),
    Fault("the function of use=pytorch reduces in the computation's dtype", "fsdp_lab/report/pytorch.py",
          '"reduce_dtype": precision.reduce_dtype}', '"reduce_dtype": precision.param_dtype}',
          PASTED, MAKE_CI),
    Fault("the function of use=pytorch clips no gradients", "fsdp_lab/report/templates/pytorch.py.j2",
          "{% if training.max_grad_norm is not none %}", "{% if false %}", PASTED, MAKE_CI),
    Fault("the step of use=pytorch with FSDP1 reduces each microbatch", "fsdp_lab/report/templates/pytorch.py.j2",
          "{% set no_sync = fsdp1 and", "{% set no_sync = false and", PASTED, MAKE_CI),
    Fault("the function of use=pytorch does not scale its learning rate", "fsdp_lab/report/pytorch.py",
          "optimizer.lr * (dp_degree if optimizer.scale_lr else 1)", "optimizer.lr", PASTED, MAKE_CI),
    Fault("the function of use=pytorch leaves a model of other names whole", "fsdp_lab/report/templates/pytorch.py.j2",
          "    if not units:", "    if False:", "report/test_pytorch.py::test_a_model_with_other_names_is_refused"),
    Fault("only the first microbatch is reduced", "fsdp_lab/training/loop.py",
          "is_last = i == len(microbatches) - 1", "is_last = i == 0", LEARNS),
    Fault("FSDP1 reduces no microbatch", "fsdp_lab/training/fsdp1.py",
          "not (is_last or each)", "True", LEARNS),
    Fault("FSDP1 clips by the norm of a rank's own part", "fsdp_lab/training/loop.py",
          "if isinstance(model, FullyShardedDataParallel):", "if False:", LEARNS),
    Fault("what FSDP1 gathers on its stream is put on that of the computation", "fsdp_lab/forecast/trace.py",
          "return self.flat_streams.get(torch.cpu.current_stream())", "return None",
          "forecast/test_program.py::test_fsdp1_gathers_and_scatters_flat_parameters_on_its_streams"),
    Fault("a rank of FSDP1 steps where another overflows", "fsdp_lab/training/optimizer.py",
          "config.sharding.api is Api.fsdp1", "False",
          "training/test_fsdp1.py::test_an_overflow_on_one_rank_skips_the_step_on_all"),
    Fault("replicas reduce each microbatch", "fsdp_lab/training/parallelize.py",
          "model.set_requires_all_reduce(is_last)", "model.set_requires_all_reduce(True)",
          "training/test_loop.py::test_replicas_reduce_once_a_step_and_shards_each_microbatch"),
    Fault("a loss that is not finite is seen at the end of an epoch", "fsdp_lab/training/loop.py",
          "        check.add(loss)\n", "        check._losses.append(loss)\n",
          "training/test_loop.py::test_a_trial_that_diverges_does_not_finish_its_epoch"),
    Fault("ranks that use other modules are not compared later", "fsdp_lab/training/divergence.py",
          "self._checks is not None and len(set(marks)) > 1", "False", COMPUTES),
    Fault("a recorded step keeps each parameter that it has seen", "fsdp_lab/training/recorder.py",
          "self._hooks: Any = WeakIdKeyDictionary()", "self._hooks: Any = {}", "forecast/test_memory.py"),
    Fault("a module that returns what another returns is the innermost", "fsdp_lab/training/recorder.py",
          "            place -= 1", "            break",
          "training/test_memory.py::test_a_change_is_of_the_innermost_module_by_its_users_name"),
    Fault("units are not compared in the first steps", "fsdp_lab/training/step_checks.py",
          "            self._meetings = 1 << 62\n", "            self._meetings = 0\n", COMPUTES),
    Fault("DDP is timed over more steps than FSDP2", "fsdp_lab/training/step_checks.py",
          "is_first = self._seen <= FIRST_STEPS", "is_first = self._seen <= FIRST_STEPS and self._is_sharded",
          "training/test_refused_models.py::test_all_settings_are_timed_over_the_same_steps"),
    Fault("writes to gathered parameters are lost in silence", "fsdp_lab/training/step_checks.py",
          "            if version_of(copy):", "            if False:", COMPUTES),
    Fault("gradients of earlier steps are forgotten", "fsdp_lab/training/step_checks.py",
          "maxlen=2 * EVERY", "maxlen=1", COMPUTES),
    Fault("parameters that are unfrozen later are not trained in silence", "fsdp_lab/training/step_checks.py",
          "if parameter.requires_grad or parameter.grad is not None:", "if False:", COMPUTES),
    Fault("each rank finds out by itself whether DDP looks for unused parameters", "fsdp_lab/training/train.py",
          "find_unused=largest(float(find_unused)) > 0", "find_unused=find_unused",
          "training/test_refused_models.py::test_what_is_kept_is_not_refused"),
    Fault("microbatches are summed, not averaged", "fsdp_lab/training/step_loss.py",
          "loss / self._parts if self._weights is None", "loss if self._weights is None", LEARNS),
    Fault("the labels of other ranks do not count", "fsdp_lab/training/step_loss.py",
          "self._dims.sum(count if self._parts == 1 else count.clone())",
          "(count if self._parts == 1 else count.clone()) * self._dims.dp_degree", LEARNS),
    Fault("the labels of the first microbatch count for each", "fsdp_lab/training/step_loss.py",
          "            scale_gradients(model, self._divisor / labels)", "            pass", LEARNS),
    Fault("a step without labels divides by zero", "fsdp_lab/training/step_loss.py",
          "return count.where(count > 0, 1.0)", "return count", LEARNS),
    Fault("a part of the loss is that of one rank", "fsdp_lab/training/step_loss.py",
          "return self._total * (self._dims.dp_degree / labels)", "return self._total / labels", LEARNS),
    Fault("a validation weighs a counted loss by items", "fsdp_lab/workloads/user/task.py",
          "loss if isinstance(loss, tuple) else (loss * batch.num_items, batch.num_items)",
          "(loss[0] / loss[1].clamp(min=1) * batch.num_items, batch.num_items)", LEARNS),
    Fault("ranks with other forms of a loss wait for each other", "fsdp_lab/training/step_checks.py",
          "if event in (MEAN, SUM_AND_COUNT):", "if event in (MEAN, SUM_AND_COUNT) and False:", NO_LOSS),
    Fault("an accuracy beside a mean divides it", "fsdp_lab/workloads/user/loss_form.py",
          "if 0 < count < 1:", "if False:", NO_LOSS),
    Fault("a count that is learned has no gradient, in silence", "fsdp_lab/workloads/user/loss_form.py",
          "if count.requires_grad:", "if False:", NO_LOSS),
    Fault("pixels are tokens", "fsdp_lab/workloads/user/units.py",
          "t.ndim == 2 and _dtype(t) not in _NOT_TOKENS", "t.ndim > 1",
          "workloads/test_user.py::test_tokens_are_those_of_parts_that_hold_tokens"),
    Fault("the tokens that a loss counts have no speed", "fsdp_lab/training/train.py",
          "per_sample = counted if tokens is None else tokens", "per_sample = tokens",
          "workloads/test_user.py::test_tokens_are_counted_where_the_user_says_so"),
    Fault("the step of use=pytorch forgets the labels of later microbatches", "fsdp_lab/report/templates/pytorch.py.j2",
          "labels_of_a_rank(sum(counts))", "labels_of_a_rank(counts[0] * len(counts))", PASTED, MAKE_CI),
    Fault("gradients are not clipped", "fsdp_lab/training/loop.py",
          "if max_norm is not None:\n            nn.utils",
          "if max_norm is not None and False:\n            nn.utils", LEARNS),
    Fault("labels weigh the same in every microbatch", "fsdp_lab/training/step_loss.py",
          "return mine * dims.dp_degree / everyone.clamp(min=1)",
          "return torch.full_like(mine, 1 / len(microbatches))", LEARNS),
    Fault("ranks of the plain loop share their buffers", "fsdp_lab/training/plain.py",
          "states[rank] = state_of(model)", "states[0] = state_of(model)", f"{PLAIN}{OWN_BUFFERS}"),
    Fault("the plain loop gives each microbatch the same weight", "fsdp_lab/training/plain.py",
          "parameter.grad.mul_(divisor / max(count, 1))", "parameter.grad.mul_(divisor / 16)", f"{PLAIN}{OWN_BUFFERS}"),
    Fault("the plain loop does not see that a model draws", "fsdp_lab/training/plain.py",
          "draws or generators(model) != before", "draws",
          f"{PLAIN}::test_random_numbers_of_a_forward_pass_are_noticed"),
    Fault("the plain loop does not know which figures rounding decides", "fsdp_lab/training/plain.py",
          "scale=1 + 2**-20", "scale=1.0", f"{PLAIN}::test_figures_that_rounding_decides_are_known"),
    Fault("the plain loop takes memory that is not free", "fsdp_lab/training/plain_limits.py",
          "if copies * sum(sizes.values()) > free_bytes:", "if False:",
          f"{PLAIN}::test_it_says_why_it_has_no_figures"),
    Fault("each replica adds to the change of a trial's weights", "fsdp_lab/training/first_steps.py",
          "return dist.get_world_size() / parts", "return 1.0", f"{PLAIN}::test_a_trial_takes_its_first_steps"),
    Fault("the figures of first steps change what a trial learns", "fsdp_lab/training/first_steps.py",
          "put_back(self._model, before)", "pass", f"{PLAIN}::test_a_trial_learns_the_same_without_the_figures"),
    Fault("a trial with weights of another is compared with the plain loop", "fsdp_lab/training/first_steps.py",
          "config.check.enabled and not resumed", "config.check.enabled",
          f"{PLAIN}::test_only_the_start_of_a_trial_has_the_figures"),
    Fault("the validation after the third step is timed", "fsdp_lab/training/loop.py",
          "            if self.first.step_done(state.step):\n                self.timer.start()",
          "            self.first.step_done(state.step)",
          "training/test_loop.py::test_a_step_waits_for_its_batch_and_for_nothing_else"),
    Fault("every rank reads the same part of a batch", "fsdp_lab/training/data.py",
          "yield from step.view(shape)[:, self.dims.dp_rank]", "yield from step.view(shape)[:, 0]", SAME_IMAGES),
    Fault("every epoch has the same order", "fsdp_lab/training/data.py",
          "self.training.seed * 1_000_003 + self.epoch", "self.training.seed * 1_000_003", SAME_IMAGES),
    Fault("a rank's process group is on another GPU than its tensors", "fsdp_lab/training/distributed.py",
          'if "nccl" in backend else None', "if False else None",
          "training/test_start.py::test_a_group_is_bound_to_the_gpu_that_the_rank_computes_on"),
    Fault("the type of a loss is not recorded", "fsdp_lab/training/step_loss.py",
          "        self.dtype = loss.dtype\n", "",
          "training/test_loop.py::test_the_type_of_a_loss_is_recorded_where_it_rounds"),
    Fault("losses are ranked within their rounding", "fsdp_lab/report/settings.py",
          "return max(spacing(metric, self.figures), spacing(metric, other.figures))", "return 0.0",
          "report/test_recommend.py::test_losses_are_not_ranked_within_their_rounding"),
    Fault("an answer that recommends nothing leaves the tags of the one before", "fsdp_lab/tracking/tags.py",
          "RECOMMENDED_TAG: _NONE if self.trial is None else str(self.trial), **stale, **own",
          "**({} if self.trial is None else {RECOMMENDED_TAG: str(self.trial)}), **own",
          "tracking/test_sweeps.py::test_the_answer_is_data_of_the_run_until_another_replaces_it"),
    Fault("a wrong sharding is recommended", "fsdp_lab/report/qualify.py",
          "does_not_fit(s) or _differs(settings, s)", "does_not_fit(s)", "report/test_self_check.py"),
    Fault("a setting that trains another model is recommended", "fsdp_lab/report/qualify.py",
          'return Coded("another_model", vars(departures[0]))', "pass", "report/test_plain_check.py"),
    Fault("a plain loop of another learning rate is compared", "fsdp_lab/config/compare.py",
          '*("model.flops_per_unit", "training.timing_warmup_steps"),', '"model.flops_per_unit", "optimizer",',
          "report/test_plain_check.py"),
    Fault("a wrong layout passes in low precision", "fsdp_lab/report/plain_check.py",
          "    for with_precision in (True, False):", "    for with_precision in (True,):",
          "report/test_plain_check.py"),
    Fault("low precision is compared as float32 is", "fsdp_lab/config/closeness.py",
          "Dtype.bfloat16: 2.0**-7", "Dtype.bfloat16: 0.0", "report/test_plain_check.py"),
    Fault("dropout is compared step by step", "fsdp_lab/config/closeness.py",
          "(key == EVAL_LOSS or not draws)", "True", "report/test_plain_check.py"),
    Fault("a sweep in which every setting trains another model has finished", "fsdp_lab/sweep/sweep.py",
          "failed = failed or check_against_plain(self.trials, self.plain_loops).nothing_agrees", "pass",
          "sweep/test_plain_loops.py::test_a_model_that_is_another_one_when_it_is_sharded_is_found"),
    Fault("kept figures of other code are compared", "fsdp_lab/sweep/plain_loops.py",
          'or not same_files(content["files"])', "",
          "sweep/test_plain_loops.py::test_a_sweep_agrees_with_its_plain_loop_and_keeps_its_figures", MAKE_CI),
    Fault("stale figures are believed", "fsdp_lab/sweep/outputs/outputs.py",
          "        self.plain_loops.confirm()", "        pass",
          "sweep/test_plain_loops.py::test_kept_figures_that_a_trial_does_not_have_are_computed_again", MAKE_CI),
    Fault("a plain loop that hangs is waited for", "fsdp_lab/sweep/plain_loops.py",
          "limit_s + _IMPORTS_S", "3600.0",
          "sweep/test_plain_loops.py::test_a_plain_loop_that_does_not_end_costs_no_sweep", MAKE_CI),
    Fault("an interrupt waits for a plain loop", "fsdp_lab/sweep/plain_loops.py",
          "                self._pool.__exit__()", "                pass",
          "sweep/test_plain_loops.py::test_an_interrupted_sweep_leaves_no_plain_loop_behind", MAKE_CI),
    Fault("TF32 is compared as float32 is", "fsdp_lab/report/self_check.py",
          "    narrow = known.float8 or has_tf32(trial)", "    narrow = known.float8",
          "report/test_self_check.py::test_tf32_rounds_more_on_a_gpu_that_has_it"),
    Fault("a warm-up hides wrong gradients", "fsdp_lab/report/self_check.py",
          "FIRST_GRAD_NORM: NORM, WARM_LOSS: _WARM,", "",
          "report/test_self_check.py::test_wrong_gradients_do_not_pass_under_a_warm_up"),
    Fault("amplified rounding is a finding", "fsdp_lab/report/self_check.py",
          "if apart or is_calm or not early:", "if True:",
          "report/test_self_check.py::test_the_first_three_steps_decide_where_they_are_known"),
    Fault("a user's metrics are in no table", "fsdp_lab/config/metrics.py",
          "*METRICS[:place], *_of_users(known)", "*METRICS[:place]",
          "report/test_golden.py::test_a_users_metric_is_in_the_pages_table_and_in_the_csv"),
    Fault("trials side by side are not named", "fsdp_lab/report/qualify.py",
          "if num_beside := int((column(settings.compared, \"beside\") > 0).sum()):", "if num_beside := 0:",
          "report/test_recommend.py::test_trials_that_ran_side_by_side_are_counted_once_in_a_note"),
    Fault("median steps are not compared", "fsdp_lab/report/recommend.py",
          "if abs(math.log(by_median / ratio)) > _UNEVEN else None", "if False else None",
          "report/test_recommend.py::test_the_ratio_by_median_steps_is_shown_where_it_differs"),
    Fault("losses next to zero are ranked", "fsdp_lab/config/metrics.py",
          "return zero if value <= zero else eps * value", "return eps * value",
          "report/test_recommend.py::test_losses_next_to_zero_differ_by_the_first_ones_rounding"),
    Fault("a step of fp16 waits twice for its scale", "fsdp_lab/training/loop.py",
          "    state.scaler.update()\n", "    state.scaler.get_scale()\n    state.scaler.update()\n",
          "training/test_optimizer.py::test_a_step_reads_the_loss_scale_once_after_its_update"),
    Fault("a forecast answers what an optimizer reads", "fsdp_lab/forecast/fake.py",
          "or _is_step_count(args[0], asks)", "or True",
          "forecast/test_memory.py::test_an_optimizer_that_reads_a_value_has_no_forecast"),
    Fault("a smaller setting is called the fastest", "fsdp_lab/report/recommend.py",
          "EQUAL if roomy else", "EQUAL if False else",
          "forecast/test_cli.py::test_the_fastest_is_recommended_though_a_plainer_is_near"),
    Fault("an own optimizer gets none of its arguments", "fsdp_lab/training/optimizer.py",
          'arguments = {**instantiate(config.optimizer.arguments, "optimizer"), "lr": lr}', 'arguments = {"lr": lr}',
          "training/test_optimizer.py::test_an_own_class_gets_the_parameters_and_its_arguments"),
    Fault("the state of an own optimizer is lost in a resume", "fsdp_lab/training/checkpoint.py",
          'self.optimizer, state["optimizer"], options=options)\n',
          'self.optimizer, state["optimizer"], options=options)\n'
          '        if not type(self.optimizer).__module__.startswith("torch."):\n'
          "            self.optimizer.state.clear()\n",
          f"{CHECKPOINT}::test_stopped_and_resumed_is_uninterrupted"),
    Fault("steps wait for batches, and no figure says so", "fsdp_lab/training/loop.py",
          "        with timer.waiting():\n            step = ", "        if True:\n            step = ",
          "training/test_loop.py::test_a_step_waits_for_its_batch_and_for_nothing_else"),
    Fault("attributes of parameters are lost when they are sharded", "fsdp_lab/training/build.py",
          "        vars(parameter).update(attributes[name])\n", "        pass\n", CONSTRUCTED),
    Fault("what a model holds of its parameters is lost in silence", "fsdp_lab/training/shardable.py",
          "for name, holder in held_parameters(model):\n        raise", "for name, holder in ():\n        raise",
          CONSTRUCTED),
    Fault("a mask on a gradient is lost in silence", "fsdp_lab/training/shardable.py",
          "        if has_hooks(parameter):", "        if False:", CONSTRUCTED),
    Fault("each rank draws its own buffers where rank 0 sends the weights", "fsdp_lab/training/weights.py",
          "        set_model_state_dict(model, first.whole, options=options)\n", "", FIRST_BITS),
    Fault("every rank draws the same shard", "fsdp_lab/training/weights.py",
          "shard = dims.dp_rank % dims.dp_shard", "shard = 0",
          "training/test_constructor.py::test_with_init_meta_modules_draw_their_own_shards"),
    Fault("weights that nobody initialised are trained", "fsdp_lab/training/weights.py",
          "        if values.isnan().any():", "        if False:",
          "training/test_constructor.py::test_with_init_meta_what_nobody_initialises_is_refused"),
    Fault("each rank builds a model that the host cannot hold", "fsdp_lab/training/weights.py",
          "most = min(here) / 2 / len(here)", "most = math.inf",
          "training/test_constructor.py::test_a_model_that_hosts_cannot_hold_twice_is_sent"),
    Fault("each of many ranks has metrics", "fsdp_lab/training/memory.py",
          "len(everyone) > _MOST_NAMED_RANKS", "len(everyone) > 1000",
          "training/test_memory.py::test_many_ranks_have_no_metrics_of_their_own"),
    Fault("tied parameters come apart", "fsdp_lab/training/parallelize.py",
          "if any(id(parameter) in own for", "if any(id(parameter) in own and False for",
          "training/test_units.py::test_units_of_nested_blocks_tied_parameters_and_containers"),
    Fault("the unit of the last norm and the head is freed after the forward pass", "fsdp_lab/training/parallelize.py",
          'return {"reshard_after_forward": False} if', 'return {"reshard_after_forward": True} if',
          "training/test_units.py::test_default_keeps_the_last_unit_after_the_forward_pass"),
    Fault("a tied head is in the unit of the last norm", "fsdp_lab/training/parallelize.py",
          "[1] if not _is_tied(model, module)]", "[1]]",
          "training/test_units.py::test_what_is_outside_of_blocks_becomes_units_and_what_comes_last_shares_one"),
    Fault("a module that blocks share is gathered by one of them", "fsdp_lab/training/parallelize.py",
          "seen, left = {unit}, [model]", "seen, left = {*unit.modules()}, [model]", LEARNS),
    Fault("float64 parameters are float32 where they are sharded", "fsdp_lab/training/parallelize.py",
          "kept = precision.param_dtype is Dtype.float32", "kept = False", LEARNS),
    Fault("tensors in an object that a unit returns are not looked for", "fsdp_lab/training/unit_hooks.py",
          '[*getattr(value, "__dict__", {}).values()]', "[]",
          "training/test_refused_models.py::test_tensors_are_found_in_any_object_once"),
    Fault("a list that a unit changes keeps nothing, unsaid", "fsdp_lab/training/unit_hooks.py",
          "if before != [*map(id, _parts(container))] and", "if False and", UNSHARDABLE),
    Fault("a weight that the root keeps may not be returned", "fsdp_lab/training/unit_hooks.py",
          "ReshardPolicy.default) if kept_by_default", ") if kept_by_default",
          "training/test_refused_models.py::test_a_weight_that_the_root_keeps_may_be_returned"),
    Fault("modules are gone through in each forward pass", "fsdp_lab/training/unit_hooks.py",
          "            self._looks -= 1\n", "",
          "training/test_refused_models.py::test_what_a_unit_keeps_is_looked_for_in_two_passes"),
    Fault("what FSDP2 cannot shard is found by FSDP2", "fsdp_lab/training/parallelize.py",
          "    check_parameters(model, [*groups, *ends], config)\n", "", UNSHARDABLE),
    Fault("what DDP cannot train is found by DDP", "fsdp_lab/training/parallelize.py",
          "        check_parameters(model, [], config)\n", "", UNSHARDABLE),
    Fault("an exported file runs code that it holds", "fsdp_lab/training/export.py",
          "content = torch.load(path, weights_only=True", "content = torch.load(path, weights_only=False",
          "training/test_model_state.py::test_an_exported_file_runs_no_code_that_it_holds"),
    Fault("parameters of two types are found by FSDP2", "fsdp_lab/training/shardable.py",
          "if first.dtype is not second.dtype:", "if False:", UNSHARDABLE),
    Fault("the compiler skips blocks that are recomputed", "fsdp_lab/training/activation_checkpointing.py",
          "block.forward = recomputed(block.forward, **options)",
          "from functools import partial\n"
          "            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)",
          "training/test_activation_checkpointing.py::test_a_recomputed_block_is_compiled_whole"),
    Fault("a recomputation changes buffers again", "fsdp_lab/training/activation_checkpointing.py",
          "                    setattr(module, name, value)\n", "                    pass\n", CHANGES_ONCE),
    Fault("a recomputation computes with the buffers of afterwards", "fsdp_lab/training/activation_checkpointing.py",
          "value.clone() if isinstance(value, Tensor) else value", "getattr(module, name)", CHANGES_ONCE),
    Fault("a buffer that is replaced in a later pass ends a trial with selective checkpointing",
          "fsdp_lab/training/activation_checkpointing.py",
          "buffer.detach().clone() if copy is None else copy", "buffer if copy is None else copy", CHANGES_ONCE),
    Fault("labels that do not count weigh in a language model", "fsdp_lab/config/workload.py",
          'or not str(data.target).startswith("fsdp_lab.")', "", LEARNS),
    Fault("a batch without a label has no loss", "fsdp_lab/workloads/tokens.py",
          "return total / count.clamp(min=1)", "return total / count", LEARNS),
    Fault("a trial starts although its forecast found a model that cannot be trained",
          "fsdp_lab/sweep/forecasts.py", 'forecast.error.code == "model_error"',
          'forecast.error.code == "no_error"', "sweep/test_other_words.py"),
    Fault("a batch that is no dictionary becomes one", "fsdp_lab/workloads/base.py",
          "            return type(batch)(parts)", "            return parts", BATCHES),
    Fault("the objects in a batch change with their copy", "fsdp_lab/workloads/base.py",
          "made = copy.copy(holder)", "made = holder", BATCHES),
    # ranks that are not alike
    Fault("parameters in another order are paired by their place", "fsdp_lab/training/alike.py",
          '_Facet("parameter", _ORDER, _shapes(parameters)),', "", ALIKE),
    Fault("what a rank freezes by itself trains on the others", "fsdp_lab/training/alike.py",
          '", trained" if tensor.requires_grad else ", frozen"', '""', ALIKE),
    Fault("layers without parameters may be in another order", "fsdp_lab/training/alike.py",
          '_Facet("module", _ORDER, [', '_Facet("module", _ORDER, [] and [', ALIKE),
    Fault("a buffer without a seed differs by rank", "fsdp_lab/training/alike.py",
          'else buffers),\n', 'else {}),\n', ALIKE),
    Fault("a vocabulary or a split of another length differs by rank", "fsdp_lab/training/train.py",
          "    check_data(data, config.training)\n", "", ALIKE),
    Fault("a number of a data set that each rank gives words differs", "fsdp_lab/training/alike.py",
          "        again = dataset[indices]", "        again = []", ALIKE),
    Fault("parameters are compared when weights have met already", "fsdp_lab/training/train.py",
          "    check_model(first.model, buffers_are_sent=first.init is Init.rank0)\n", "", ALIKE),
    Fault("the end of a large weight is not looked at", "fsdp_lab/training/alike.py",
          ", values[-_SAMPLED:]])", "])", MADE_ALIKE),
    Fault("weights that only some ranks have are not compared", "fsdp_lab/training/alike.py",
          "if len({*digests} - {None}) < 2", "if None in digests", MADE_ALIKE),
    Fault("ranks whose last digits differ are refused", "fsdp_lab/training/alike.py",
          "eps**0.5", "0.0", MADE_ALIKE),
    Fault("a weight that is tied on some ranks alone is trained as two", "fsdp_lab/training/alike.py",
          "{f', the same as {tied}' * (tied != name)}", "", MADE_ALIKE),
    Fault("a codebook that each rank writes has no note", "fsdp_lab/training/train.py",
          "if state.epoch == first_epoch and", "if state.epoch < first_epoch and", ALIKE_NOTE),
    Fault("a note of the first epoch stays in the trial's folder", "fsdp_lab/sweep/sweep.py",
          "if facts and facts != state.facts:", "if facts and not state.facts:",
          "sweep/test_fates.py::test_what_the_first_epoch_shows_is_noted_everywhere"),
    Fault("workers of Ray have a hash seed each", "fsdp_lab/engine/cluster.py",
          'HASH_SEED: "0",  # of workers', '"PYTHONHASHSEED_": "0",  # of workers',
          "sweep/test_fates.py::test_ranks_have_one_hash_seed"),
    # checkpoints and exported models
    Fault("a resume starts its epoch again", "fsdp_lab/training/checkpoint.py",
          'position["epoch"], position["step"], position["epoch_step"]', 'position["epoch"], position["step"], 0',
          "workloads/test_user.py::test_dropout_goes_on_in_an_epoch_as_if_never_stopped", MAKE_CI),
    Fault("a resume forgets earlier epochs", "fsdp_lab/training/checkpoint.py",
          'state.history = name, meta["history"]', "state.history = name, []", CHECKPOINT),
    Fault("the last weights are exported as the best", "fsdp_lab/training/checkpoint.py",
          "if best.name != self._newest:", "if False:", BEST),
    Fault("extra state is lost in a resume", "fsdp_lab/training/model_state.py",
          "_unpack(value) if is_extra_state(n)", '{"calls": 0, "means": []} if is_extra_state(n)', KEPT),
    Fault("a part that the model compiles itself is not found in a resume", "fsdp_lab/workloads/base.py",
          '("_fsdp_wrapped_module", "_orig_mod")', '("_fsdp_wrapped_module",)',
          "training/test_model_state.py::test_a_model_that_compiles_a_part_itself_is_loaded"),
    Fault("a checkpoint's buffers have the sizes of now", "fsdp_lab/training/model_state.py",
          "            if is_buffer and", "            if False and", KEPT),
    Fault("extra state is not exported", "fsdp_lab/training/export.py",
          '"state_dict": weights,',
          '"state_dict": {name: value for name, value in weights.items() if isinstance(value, Tensor)},', KEPT),
    Fault("the optimizer of another run keeps its settings", "fsdp_lab/training/checkpoint.py",
          "            group.update(of_this_trial)", "            pass", ANOTHER),
    Fault("the position of another run counts", "fsdp_lab/training/checkpoint.py",
          "if is_own:\n                self._load(", "if True:\n                self._load(", ANOTHER),
    Fault("the speed of other workers counts", "fsdp_lab/training/checkpoint.py",
          "self.times_count = there == here", "self.times_count = True",
          "training/test_checkpoint.py::test_resumed_on_another_number_of_workers"),
    Fault("only an epoch that is saved anyway is exported as the best", "fsdp_lab/training/train.py",
          "if not (through or to_export) and", "if not through and", BEST),
    Fault("some errors of one rank leave the others waiting", "fsdp_lab/training/distributed.py",
          "except Exception as error:  # noqa: BLE001 (it is raised below)", "except (OSError, ValueError) as error:",
          "training/test_loop.py::test_every_kind_of_error_is_raised_on_every_rank"),
    # forecasts
    Fault("every rank is forecast as the first", "fsdp_lab/forecast/forecast.py",
          "fake_world(num_workers, device, rank) as ranks", "fake_world(num_workers, device, 0) as ranks", HOLDS),
    Fault("a byte of every change is lost", "fsdp_lab/training/recorder.py",
          "known.category, known.num_bytes, module", "known.category, known.num_bytes - 1, module",
          "forecast/test_memory.py::test_three_peaks_by_hand_and_by_the_allocator_are_forecast"),
    Fault("blocks are not rounded up", "fsdp_lab/forecast/allocator.py",
          "size = max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)", "size = num_bytes",
          "forecast/test_fake.py"),
    Fault("the end of an expandable segment is taken first", "fsdp_lab/forecast/allocator.py",
          "            index += 1  # the end", "            index += 0  # the end", "forecast/test_fake.py"),
    Fault("losses within their rounding are told apart", "fsdp_lab/config/metrics.py",
          "key in LOSSES and abs(one[key] - other[key]) <= max(spacing(key, one), spacing(key, other))", "False",
          "sweep/test_terminal.py::test_losses_within_their_rounding_are_both_the_best"),
    Fault("what does not fit is said to fit", "fsdp_lab/forecast/capacity.py",
          "return self.needed_bytes <= self.capacity_bytes", "return self.peak_bytes // 2 <= self.capacity_bytes",
          "forecast/test_choice.py"),
    Fault("attention under a name of the model's own has the CPU's kernel", "fsdp_lab/forecast/kernels.py",
          'if m is F or m.__name__.partition(".")[0] != "torch"', "if m is F",
          "forecast/test_fake.py::test_attention_that_a_model_imports_by_its_name_is_a_gpus"),
    Fault("one worker of a host has its memory to itself", "fsdp_lab/forecast/capacity.py",
          "return self.host_bytes * self.host.num_workers", "return self.host_bytes", "forecast/test_choice.py"),
    Fault("pageable copies are priced like pinned ones", "fsdp_lab/forecast/forecast.py",
          "        speed = replace(paged, low_s=speed.low_s, high_s=slowest.high_s)", "        pass",
          "forecast/test_speed.py::test_the_range_covers_how_slow_pageable_copies_are_assumed"),
    Fault("a compiled step is measured as if it were eager", "fsdp_lab/training/memory.py",
          "record_compiled_step if self.config.compile else record_step", "record_step",
          f"{HOLDS}[language: sharding=per_block compile=true training.grad_accum_steps=2]", MAKE_CI),
    Fault("forecasts that fail are told apart by their texts", "fsdp_lab/sweep/forecasts.py",
          "first.setdefault((why.error, why.at), (", 'first.setdefault((why.text, ""), (',
          "sweep/test_other_words.py::test_a_model_that_cannot_train_does_not_start_but_others_do"),
    Fault("forecasts run compiled blocks eagerly", "fsdp_lab/forecast/forecast.py",
          "            if config.compile:", "            if False:",
          "forecast/test_memory.py::test_a_compiled_step_is_forecast_within_3_percent", MAKE_CI),
    Fault("a fused kernel has no inputs", "fsdp_lab/forecast/torch_private.py",
          'for side in ("in_", "out_")', 'for side in ("no_", "out_")', "forecast/test_program.py"),
    Fault("a forecast for a GPU with a data sheet fails", "fsdp_lab/forecast/kernels.py",
          "sheet.num_cores if sheet", "sheet.cores if sheet",
          "test_packages.py::test_the_gpu_suite_runs_with_pytorch_and_pytest_alone", MAKE_CI),
    Fault("a step that is followed holds a third tensor for a sum of gradients", "fsdp_lab/training/recorder.py",
          "inside(recorder), accumulates", "inside(recorder)", ADDED_UP),
    Fault("a gradient that another tensor has too is overwritten", "fsdp_lab/training/torch_private.py",
          "elif references in self._alone and", "elif True and", ADDED_UP),
    Fault("the buffers of a GPU's kernels are left out", "fsdp_lab/forecast/kernels.py",
          "return 4 * (elements + rows) + 256 + shared", "return 4 * elements + shared", "forecast/test_fake.py"),
    Fault("the loss of a compiled trial stays eager", "fsdp_lab/training/build.py",
          "    if config.compiles_loss:", "    if False:",
          "forecast/test_program.py::test_a_compiled_loss_makes_no_logits_in_float32"),
    Fault("float8 is forecast as bfloat16", "fsdp_lab/forecast/forecast.py",
          "to_float8=apply_fake_float8", "to_float8=lambda *_: None", "forecast/test_program.py"),
    Fault("gathers never wait for reductions", "fsdp_lab/forecast/speed/streams.py",
          "communicator = (operator.group, separate_scatter and", "communicator = (operator.group, True and",
          "forecast/test_speed.py"),
    Fault("the all-reduce of replicas waits behind the reduce-scatter", "fsdp_lab/forecast/trace.py",
          "(Stream.all_reduce if in_fsdp2 else Stream.scatter)", "Stream.scatter", "forecast/test_program.py"),
    Fault("a range leaves out that the network is assumed", "fsdp_lab/forecast/speed/predict.py",
          "possible = [step_s, *network.steps.values()] if network else [step_s]", "possible = [step_s]",
          "forecast/test_cli.py::test_the_command_names_the_network_that_it_assumed"),
    Fault("precision=tf32 multiplies in full precision", "fsdp_lab/training/parallelize.py",
          'set_float32_matmul_precision("high")', "set_float32_matmul_precision(before)",
          "training/test_precision.py::test_a_trial_multiplies_in_tf32_only_if_it_says_so_on_a_gpu"),
    Fault("TF32 stays on after its trial", "fsdp_lab/training/parallelize.py",
          "        torch.set_float32_matmul_precision(before)", "        pass", "training/test_precision.py"),
    Fault("a step of two kinds has the narrower error", "fsdp_lab/forecast/speed/device.py",
          "return max((getattr(self, kind)", "return min((getattr(self, kind)", "forecast/test_speed.py"),
    Fault("what collectives cost the work beside them is left out", "fsdp_lab/forecast/speed/predict.py",
          "(1 - device.efficiency.overlap) * min(", "0 * min(",
          "forecast/test_devices.py::test_a_corrected_step_over_an_assumed_network"),
    Fault("what layers wait for is said to hide work", "fsdp_lab/forecast/speed/predict.py",
          "op.kind.is_collective and op.stream is not Stream.layers", "op.kind.is_collective",
          "forecast/test_speed.py"),
    Fault("a forecast sends within the groups of the one before", "fsdp_lab/training/distributed.py",
          "        forget_meshes()", "        pass", TRACE),
    Fault("gradients wait for what layers scatter", "fsdp_lab/forecast/speed/streams.py",
          "if operator.kind is Kind.scatter and stream is Stream.scatter", "if operator.kind is Kind.scatter",
          "forecast/test_speed.py"),
    Fault("TF32 is forecast as float32", "fsdp_lab/forecast/speed/costs.py",
          "return products or (", "return False or (", "forecast/test_speed.py"),
    Fault("a number of workers that is slower is not named", "fsdp_lab/report/templates/forecast_words.j2",
          "if now.speed.samples_per_s < fastest.speed.samples_per_s", "if false", "forecast/test_answer.py"),
    Fault("replicas of whole nodes are not named where a step waits", "fsdp_lab/forecast/answer.py",
          '+ speed.shares.get("scatter", 0.0) >= _WAITS', ">= _WAITS", "forecast/test_answer.py"),
    Fault("a long table hides the settings of more workers", "fsdp_lab/forecast/table.py",
          "len(rows) <= most or id(row) in kept", "len(rows) <= most or row in rows[:most]",
          "forecast/test_answer.py"),
    Fault("attention on Hopper has the price of FlashAttention-2", "fsdp_lab/forecast/speed/costs.py",
          "if most.cudnn_attention is not None and", "if False and", "forecast/test_speed.py"),
    Fault("an all-reduce passes its bytes once", "fsdp_lab/forecast/speed/costs.py",
          "passes = 2 if operator.kind is Kind.reduce else 1", "passes = 1", "forecast/test_speed.py"),
    Fault("a checkpoint that failed fills the disk of the others", "fsdp_lab/training/checkpoint.py",
          "                self.place.discard(making)", "                pass",
          "sweep/test_damage.py::test_a_full_disk_that_takes_no_checkpoint_fails_the_trial", MAKE_CI),
    # engine
    Fault("an epoch is written twice", "fsdp_lab/record/trial_files.py",
          "        if is_new:", "        if True:", "engine/test_outcome.py"),
    Fault("an epoch that a killed process did not report is lost", "fsdp_lab/sweep/sweep.py",
          "        for metrics in read_metrics(folder):", "        for metrics in ():",
          "sweep/test_runner.py::test_an_epoch_that_was_not_reported_comes_from_the_folder"),
    Fault("an outcome is replaced by a file that is not on the disk", "fsdp_lab/record/trial_json.py",
          "durable or trial.outcome is not None", "durable",
          "sweep/test_record.py::test_an_outcome_stays_on_disk_when_its_file_is_written_again"),
    Fault("a later outcome of a trial replaces the first", "fsdp_lab/record/trial_json.py",
          "        if trial.outcome is None:", "        if True:", TRIAL_JSON),
    Fault("of two processes that change a trial's record one is lost", "fsdp_lab/record/trial_json.py",
          '    with exclusive(folder / ".trial.lock", _LIMIT_S, parents=False):', "    if True:", TRIAL_JSON),
    Fault("a trial that is stopped has failed, because its workers went first", "fsdp_lab/sweep/executors/tuner.py",
          "            self._sweep.write_stop(number, result)",
          "            resources.release_placement_group(self._sweep.folder_of(number))\n"
          "            self._sweep.write_stop(number, result)",
          "sweep/test_runner.py::test_a_stop_is_written_before_the_workers_of_the_trial_go"),
    Fault("a trial that has ended keeps its cores", "fsdp_lab/sweep/executors/tuner.py",
          "                if state.ended:\n", "                if False:\n",
          "sweep/test_runner.py::test_a_process_that_cannot_be_used_again_holds_no_places"),
    Fault("trials that a memory kill ended begin from nothing", "fsdp_lab/sweep/executors/tuner.py",
          "        state.resuming = True\n", "",
          "sweep/test_runner.py::test_trials_that_a_memory_kill_ended_resume_with_new_epochs"),
    Fault("Ray prints a paragraph about each killed worker", "fsdp_lab/engine/cluster.py",
          '    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",', '    "RAY_DEDUP_LOGS_SKIP_REGEX": "#",',
          "sweep/test_fates.py::test_a_failed_trial_makes_the_exit_status_1_and_is_named"),
    Fault("a cluster that was started last and is gone is left to Ray", "fsdp_lab/engine/cluster.py",
          "return last.read_text().strip() if last.exists() else", "return last.read_text().strip() if False else",
          "engine/test_cluster.py::test_the_last_cluster_of_this_machine_is_named_if_gone"),
    Fault("a line that a kill cut is continued", "fsdp_lab/storage/files.py",
          r'            if lines.read(1) != b"\n":', "            if False:", "sweep/test_record.py"),
    Fault("running out of memory is a failure like others", "fsdp_lab/engine/failures.py",
          "if isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY):", "if False:",
          "engine/test_outcome.py::test_kinds_of_failure"),
    Fault("a rank that lost its peers is named as the cause", "fsdp_lab/engine/failures.py",
          "return Code.peer_lost if any(sign in text for sign in _PEER_LOST) else Code.error", "return Code.error",
          "engine/test_outcome.py"),
    Fault("a trial that ran out of memory is tried again", "fsdp_lab/engine/outcome.py",
          "_FINAL = (Code.out_of_memory, ", "_FINAL = (",
          "engine/test_outcome.py::test_what_would_fail_again_is_not_tried_again"),
    Fault("a trial's status is decided by a sentence", "fsdp_lab/record/reasons.py",
          "return _STATUS.get(self.code, TrialStatus.failed)",
          'return TrialStatus.diverged if "the loss of" in str(self.values) else TrialStatus.failed',
          "sweep/test_other_words.py"),
    Fault("a rank that hangs does not end", "fsdp_lab/engine/rank.py",
          "exit=self._exits, file", "file",
          "engine/test_outcome.py::test_a_step_beyond_its_limit_ends_and_names_its_line"),
    Fault("the rank that others wait for is taken for one that waits", "fsdp_lab/engine/hang.py",
          "key=lambda rank: (_COLLECTIVES in places[rank], rank)", "key=lambda rank: rank",
          "engine/test_outcome.py::test_the_rank_that_others_wait_for_is_named"),
    Fault("a kill by the kernel counts on every node", "fsdp_lab/engine/outcome.py",
          "elif kernel_killed and node == here:", "elif kernel_killed:",
          "engine/test_outcome.py::test_a_kill_by_the_kernel_counts_for_a_rank_on_its_node"),
    Fault("an epoch is reported at every look", "fsdp_lab/engine/job.py",
          'metrics["epoch"] not in self._reported and', "", "engine/test_outcome.py"),
    Fault("a failed sweep ends with 0", "fsdp_lab/sweep/sweep.py",
          "return ExitCode.failed if failed else ExitCode.finished", "return ExitCode.finished",
          "sweep/test_runner.py::test_the_exit_code_says_how_a_sweep_ended"),
    Fault("gloo uses the interface of the host's name", "fsdp_lab/engine/rendezvous.py",
          'os.environ.setdefault("GLOO_SOCKET_IFNAME", name)', "pass",
          "engine/test_ray.py::test_ranks_listen_only_on_the_interface_of_their_node"),
    # sweeps and their folders
    Fault("a lock is not taken", "fsdp_lab/storage/locks.py",
          "lock.acquire()\n    except Timeout:", "pass\n    except Timeout:", "test_files.py"),
    Fault("a file has its name before it is on the disk", "fsdp_lab/storage/files.py",
          "        if durable:\n            sync(making)\n        making.rename(path)\n        if durable:",
          "        making.rename(path)\n        if durable:\n            sync(path)", SYNCED),
    Fault("a foreign folder is accepted", "fsdp_lab/sweep/store/find.py",
          "    if reason is not None and not trust:", "    if reason is not None and trust:",
          "sweep/test_trust.py::test_another_users_folder_runs_no_code_unless_trusted"),
    Fault("a folder's override runs code", "fsdp_lab/sweep/store/find.py",
          "not in known and not _USERS_KEY.fullmatch(key)", "is None",
          "sweep/test_trust.py::test_a_file_sets_keys_of_trials_and_no_others"),
    Fault("a finished trial runs again", "fsdp_lab/sweep/store/resume.py",
          "state.status, state.reason, state.seconds = outcome.status, outcome.reason, outcome.seconds",
          "state.reason, state.seconds = outcome.reason, outcome.seconds",
          "sweep/test_resume.py::test_nothing_left_says_so_and_trains_nothing"),
    Fault("every resume tries failed trials again", "fsdp_lab/sweep/store/resume.py",
          "if config.resume_failed and state.status is", "if state.status is",
          "sweep/test_other_words.py::test_other_words_change_nothing_but_what_people_read", MAKE_CI),
    Fault("changed code of the user is not noticed", "fsdp_lab/config/code.py",
          "_digest([PACKAGE, *(root for name in packages if (root := user_root(name)) is not None)])",
          "_digest([PACKAGE])",
          "workloads/test_user.py::test_the_digest_is_of_the_files_of_the_users_packages"),
    Fault("changed data are not noticed", "fsdp_lab/sweep/store/resume.py",
          "        if now != before:", "        if now is None:",
          "sweep/test_resume.py::test_other_settings_data_and_code_are_refused_by_name"),
    Fault("a search ends with what its sampler repeats", "fsdp_lab/sweep/search.py",
          "        for _ in range(_MOST_REFUSED):", "        for _ in range(0):",
          "sweep/test_search.py::test_a_search_reaches_every_setting_of_the_default_axes"),
    Fault("cells are checked for the workers of this machine, not of the cluster", "fsdp_lab/config/machine.py",
          "else default_num_workers(config.cluster.address)", "else default_num_workers()",
          "sweep/test_grid.py::test_cells_are_composed_for_the_workers_of_the_cluster"),
    Fault("the last cell of a grid is left out", "fsdp_lab/sweep/grid.py",
          "return [list(cell) for cell in itertools.product(*values)]",
          "return [list(cell) for cell in itertools.product(*values)][:-1] or [[]]",
          "sweep/test_grid.py::test_arguments_become_trials_in_the_order_of_hydras_sweeper"),
    Fault("a name that looks like a number is one", "fsdp_lab/config/overrides.py",
          "value_word(typed, typed) if is_changed else typed", "typed", "config/test_words.py"),
    Fault("a key that is swept is replaced in silence", "fsdp_lab/config/overrides.py",
          "keys.count(override.key_or_group) > 1 and", "False and", REFUSES),
    Fault("a user's option is ignored for ours", "fsdp_lab/config/overrides.py",
          "mine.is_file() and mine.read_bytes() != ours.read_bytes()", "not mine", REFUSES),
    Fault("an infinite interval is drawn from", "fsdp_lab/sweep/search.py",
          "if not math.isfinite(sweep.end - sweep.start):", "if False:",
          "sweep/test_search.py::test_an_interval_that_cannot_be_drawn_from_is_refused"),
    Fault("a trial reads another trial's number", "fsdp_lab/config/compose.py",
          "    HydraConfig.instance().set_config(cfg)", "    cfg",
          "sweep/test_grid.py::test_hydras_own_resolver_reads_the_trial_that_is_composed"),
    Fault("two dictionaries are one setting", "fsdp_lab/sweep/names.py",
          "return value if typed is None else typed", "return value",
          "sweep/test_names.py::test_values_of_the_users_own_are_shown_as_typed"),
    Fault("quotes inside choice() are dropped", "fsdp_lab/config/overrides.py",
          '.parse_override(f"key={text}").value() == plain:', '.parse_override(f"key={text}"):',
          "sweep/test_grid.py::test_each_spelling_of_a_value_stays_that_value"),
    Fault("two trials share a folder", "fsdp_lab/sweep/store/folder.py",
          "(other := owners.setdefault(_key(place), number)) != number", "(other := number) != number",
          "sweep/test_names.py::test_trials_that_share_or_leave_the_folder_are_refused"),
    # MLflow
    Fault("an epoch is sent twice", "fsdp_lab/tracking/projection.py",
          "            if step not in stored.steps:", "            if step is not None:", TRACKING),
    Fault("a write that got through makes a second run", "fsdp_lab/tracking/projection.py",
          "        if number in self._unsure:", "        if False:", TRACKING),
    Fault("a run that goes on keeps how it ended", "fsdp_lab/tracking/projection.py",
          "[tag for tag in _END_TAGS if tag in stored.tags])", "[])",
          "tracking/test_tracking.py::test_a_later_start_finds_the_runs_and_sends_what_they_lack"),
    Fault("what a store that is away has not taken is forgotten", "fsdp_lab/tracking/projection.py",
          "self._changed.setdefault(number)  # behind the others", "self._changed.pop(number, None)", TRACKING),
    Fault("an address with a password is taken", "fsdp_lab/config/address.py",
          "if found and", "if not found and", "sweep/test_trust.py::test_an_address_with_credentials_is_refused"),
    # answers
    Fault("a tie is called faster", "fsdp_lab/report/recommend.py",
          " or (ratio.known and ratio.low <= 1 <= ratio.high)", "", "report/test_recommend.py"),
    Fault("trials beside other processes are not named", "fsdp_lab/report/qualify.py",
          "others[others > _BUSY]", "others[others > 2]",
          "report/test_recommend.py::test_trials_beside_other_processes_are_named"),
    Fault("an interval is half as wide", "fsdp_lab/report/speed.py",
          "half = _quantile(groups, self.freedom) * ", "half = _quantile(groups, self.freedom) / 2 * ",
          "report/test_speed.py"),
    Fault("a regression beyond the tolerance passes", "fsdp_lab/nightly/gate.py",
          "if change > max(limit, noise, rounding):", "if change > max(10 * limit, noise, rounding):", GATE),
    Fault("noise is reported as a regression", "fsdp_lab/nightly/gate.py",
          "if change > max(limit, noise, rounding):", "if change > max(limit, rounding):", GATE),
    Fault("a drift of three nights passes", "fsdp_lab/nightly/gate.py",
          "elif level - levels[best] > max(limit, noise_of_best, rounding):", "elif False:", GATE),
    Fault("repeats of other nights do not count", "fsdp_lab/nightly/gate.py",
          "_WEIGHT + measured\n", "len(now)\n", GATE),
    Fault("a loss within its rounding is a regression", "fsdp_lab/nightly/gate.py",
          "math.log1p(max(eps, default=0.0))", "0.0", GATE),
    Fault("a night uses the speed of another machine", "fsdp_lab/nightly/gate.py",
          "if not same_machine:", "if False:", GATE),
    Fault("midnight is lost where clocks change", "fsdp_lab/commands/nightly.py",
          "replace(tzinfo=UTC) - _LARGEST_CHANGE", "replace(tzinfo=UTC) + _LARGEST_CHANGE", "nightly/test_schedule.py"),
    Fault("hourly nights stop where clocks are set back", "fsdp_lab/commands/nightly.py",
          "(0, 1) if fields[1]", "(0,) if fields[1]", "nightly/test_schedule.py"),
    Fault("a night that was missed is not made up", "fsdp_lab/commands/nightly.py",
          "(not past or times(past[-1]) <= now)", "not past", "nightly/test_schedule.py::test_which_night_waits"),
    Fault("a night that is killed ends the schedule", "fsdp_lab/commands/nightly.py",
          'log("the night was killed, and is incomplete")', "return 1", MISSED),
    Fault("each of the nights that were missed runs", "fsdp_lab/commands/nightly.py",
          "night, process = times(datetime.now(UTC)), None\n    except",
          "night, process = times(night), None\n    except", MISSED),
    Fault("weekdays of a schedule are APScheduler's", "fsdp_lab/commands/nightly.py",
          'return re.sub("[0-7]", lambda number: _DAYS[int(number[0])], listed)', "return listed",
          "nightly/test_schedule.py::test_cron_means_what_it_means_to_cron"),
    Fault("a night from the future is the last one", "fsdp_lab/nightly/night.py",
          "key=lambda night: night.number", "key=lambda night: night.begun", "nightly/test_planted.py"),
    Fault("a machine is known by its name", "fsdp_lab/nightly/night.py",
          "{cpu_name()}", "{__import__('platform').node()}", "nightly/test_planted.py"),
    Fault("the commit is fsdp_lab's", "fsdp_lab/config/code.py", "here = Path()", "here = PACKAGE", TRACKING),
    Fault("a change of the user's code is not named", "fsdp_lab/nightly/gate.py",
          "there.get(key) != here.get(key)]", 'there.get(key) != here.get(key) and "user" not in key]',
          "nightly/test_texts.py"),
    # configuration
    Fault("a launcher's variables reach PyTorch", "fsdp_lab/config/launcher.py",
          "        del os.environ[name]", "        pass",
          "test_cli.py::test_a_launchers_variables_are_left_a_second_start_refused"),
    Fault("a silent address is taken for a Ray", "fsdp_lab/engine/cluster.py",
          "    if answer[3:4] != _SETTINGS and", "    if False and", "engine/test_cluster.py"),
    Fault("a path is taken that is too long for sockets", "fsdp_lab/config/machine.py",
          "_SOCKET_PATH = 107", "_SOCKET_PATH = 108", "config/test_checks.py"),
    Fault("a degree that does not divide the workers is accepted", "fsdp_lab/config/rules.py",
          "if num_workers % sharding.dp_replicate:", "if False:", RULES),
    Fault("tensor-parallel workers count as parts of a batch", "fsdp_lab/config/rules.py",
          "parts = sharding.dp_degree(num_workers) *", "parts = num_workers *", RULES),
    Fault("a degree that does not divide heads is accepted", "fsdp_lab/config/rules.py",
          "        if size % tp:", "        if name == workers and size % tp:", RULES),
    Fault("tensor-parallel workers on two nodes train", "fsdp_lab/config/rules.py",
          "        if len(set(group)) > 1:", "        if False:", "config/test_checks.py"),
    Fault("nodes too small for a tensor-parallel group are taken", "fsdp_lab/engine/resources.py",
          "    if in_groups < num_workers:", "    if False:", "engine/test_cluster.py"),
    Fault("${per_worker} gives each tensor-parallel worker samples of its own", "fsdp_lab/config/compose.py",
          "workers // max(1, tp)", "workers", "sweep/test_grid.py"),
    Fault("each tensor-parallel rank trains norms of heads alone", "fsdp_lab/workloads/hf/models.py",
          '"replicated_with_grad_allreduce": "heads"', '"replicated_with_grad_allreduce": ""',
          "workloads/test_transformers.py::test_norms_of_heads_have_the_gradients_of_all_heads", MAKE_CI),
    Fault("loss scaling with bfloat16 is accepted", "fsdp_lab/config/rules.py",
          "if precision.loss_scaling and precision.param_dtype is Dtype.bfloat16:", "if False:", RULES),
)  # fmt: skip


def main() -> int:
    """Plant the named faults, or all, one for each core at a time; 1 if one is not noticed."""
    named, cores = sys.argv[1:], os.cpu_count() or 1
    faults = [fault for fault in FAULTS if not named or any(name in fault.name for name in named)]
    copies, missed = Queue[Path](), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as threads:
        for number in range(cores):
            copies.put(copy_project(Path(folder) / str(number)))
        failing = _failing_without({(fault.test, fault.marks) for fault in faults}, copies.queue[0])
        for line, noticed in threads.map(lambda fault: _try(fault, copies, failing), faults):
            print(line, flush=True)
            missed += not noticed
    print(f"{len(faults) - missed} of {len(faults)} faults noticed")
    return int(missed > 0)


def copy_project(folder: Path) -> Path:
    """Copy the files that git has or would add, and commit them: runs record the commit."""
    git = ("git", "-c", "user.name=tests", "-c", "user.email=tests@localhost")
    listed = subprocess.check_output([*git, "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    for name in (name for name in listed if (ROOT / name).is_file()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "copy")):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def _failing_without(tests: Collection[tuple[str, str]], copy: Path) -> set[str]:
    """Return the tests, and their files, that fail without a fault, where the faults are planted."""
    failing = set()
    for marks in {marks for _, marks in tests}:
        chosen = sorted(test for test, others in tests if others == marks)
        print(f"without a fault: {len(chosen)} tests of `{marks}`", flush=True)
        status, output = _run(chosen, marks, copy, "-n", "2", "--dist", "loadfile")
        if status not in (0, 1):
            raise RuntimeError(f"the tests end with {status} without a fault\n{output[-2000:]}")
        for test in _failed(output):
            failing |= {test, test.partition("[")[0], test.partition("::")[0]}
    return failing


def _try(fault: Fault, copies: Queue[Path], failing: Collection[str]) -> tuple[str, bool]:
    """Return a line about a fault, and whether its test failed. `failing`: tests that fail without it."""
    if f"tests/{fault.test}" in failing:
        return f"MISSED          {fault.name}: {fault.test} does not pass without a fault", False
    copy = copies.get()
    original, begun = (copy / fault.file).read_text(), time.monotonic()
    try:
        (copy / fault.file).write_text(original.replace(fault.right, fault.wrong))
        status, output = _run([fault.test], fault.marks, copy, "-x")
    finally:
        (copy / fault.file).write_text(original)
        copies.put(copy)
    took = f"{time.monotonic() - begun:.0f} s"
    if status == 1:  # tests failed; anything else is an error of the run
        return f"noticed  {took:>5}  {fault.name}: {next(_failed(output), '')}", True
    return f"MISSED   {took:>5}  {fault.name}: {fault.test} ended with {status}\n{output[-2000:]}", False


def _run(tests: Sequence[str], marks: str, copy: Path, *options: str) -> tuple[int, str]:
    """Run the cases of some tests in a tier; return pytest's status and output."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}  # before the installed project
    environment.pop("FSDP_LAB_TESTS", None)  # another import server: it has imported the fault
    limit = ("timeout", "--kill-after=10", str(600 * (1 + len(tests) // 10)))
    words = ["-q", "-p", "no:cacheprovider", *options, "-m", marks, *(f"tests/{test}" for test in tests)]
    done = subprocess.run(
        [*limit, sys.executable, "-m", "pytest", *words],
        cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _failed(output: str) -> Iterator[str]:
    ended = (line.partition(" ") for line in output.splitlines())
    return (test.partition(" - ")[0] for how, _, test in ended if how in ("FAILED", "ERROR"))


if __name__ == "__main__":
    sys.exit(main())
