"""Every metric that a recipe writes: what it is, its unit, what is healthy, and what to do if not.

The page on metrics is made from this table. A name with ``{...}`` stands for any text there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple


class MetricNote(NamedTuple):
    """What there is to know of one metric."""

    name: str
    unit: str
    meaning: str
    healthy: str
    """What a run that learns mostly shows; "any" where there is no better or worse."""
    remedy: str = ""
    """What to do where it does not; empty where nothing is to be done."""


FAMILIES: Mapping[str, str] = {
    "rollout": "What was sampled, and what it earned",
    "signal": "Whether there is something to learn",
    "train": "The update",
    "parity": "Whether sampler and trainer agree",
    "version": "How old the trained samples are",
    "async": "Rollouts beside training (async_rl_loop, igpo_loop)",
    "igpo": "Credit per turn (igpo_loop)",
    "eval": "Held-out rows",
    "batch": "How a step was cut into calls",
    "perf": "Time",
}
"""What names begin with, in the order in which somebody who looks for a fault reads them."""

METRICS: tuple[MetricNote, ...] = (
    # rollout/*
    MetricNote(
        "rollout/raw_reward",
        "reward",
        "Mean reward of all scored completions, trained or not: the curve to watch.",
        "rises over tens of steps, with noise",
        "Flat near its lowest value: the rows are too hard or the reward finds no answer "
        "(rollout/parse_fail_ratio). Flat near its highest: the rows are solved.",
    ),
    MetricNote(
        "rollout/reward",
        "reward",
        "Mean reward of the trained completions. Groups whose answers all earned the same are left "
        "out, so it says less than rollout/raw_reward.",
        "any",
    ),
    MetricNote(
        "rollout/accuracy",
        "share",
        "Share of scored completions whose reward is above 0.5. For graded rewards read "
        "rollout/raw_reward instead.",
        "rises",
        "As for rollout/raw_reward.",
    ),
    MetricNote(
        "rollout/reward_min",
        "reward",
        "Smallest reward of the step.",
        "below rollout/reward_max",
        "Equal to rollout/reward_max for many steps: the reward does not tell answers apart.",
    ),
    MetricNote(
        "rollout/reward_max",
        "reward",
        "Largest reward of the step.",
        "above rollout/reward_min",
        "Never above the smallest possible reward: no answer is ever right; take easier rows.",
    ),
    MetricNote(
        "rollout/group_reward_std_mean",
        "reward",
        "Population deviation of the rewards within a group, mean over groups.",
        "above 0; with rewards of 0 and 1 up to 0.5",
        "Near 0: answers to one row earn the same. Raise completions_per_prompt or temperature, or "
        "take rows of another difficulty.",
    ),
    MetricNote(
        "rollout/group_reward_std_min",
        "reward",
        "The same, of the group with the smallest deviation.",
        "any; 0 where some group is uniform",
    ),
    MetricNote(
        "rollout/group_reward_std_max",
        "reward",
        "The same, of the group with the largest deviation.",
        "above 0",
        "0: no group of this step has anything to compare.",
    ),
    MetricNote(
        "rollout/group_reward_mean_std",
        "reward",
        "Deviation of the groups' mean rewards: how much rows differ in difficulty.",
        "any",
    ),
    MetricNote(
        "rollout/group_uniform_ratio",
        "share",
        "Share of groups whose completions all earned the same. They teach nothing.",
        "below 0.75",
        "Higher: look at the next two. Mix rows that are sometimes solved, or raise "
        "completions_per_prompt.",
    ),
    MetricNote(
        "rollout/group_solved_ratio",
        "share",
        "Share of groups in which all rewards are above 0.5.",
        "below 0.75; near 1 the rows are learned",
        "Near 1: take harder rows, or stop: the run has done its work.",
    ),
    MetricNote(
        "rollout/group_unsolved_ratio",
        "share",
        "Share of groups in which no reward is above 0.5.",
        "below 0.75, and falling",
        "Near 1: take easier rows, give part of the reward for part of the answer, or start from a "
        "stronger model.",
    ),
    MetricNote(
        "rollout/entropy",
        "nats per token",
        "Entropy of the sampled tokens, estimated from the sampler's logprobs.",
        "falls slowly and stays above a tenth of its first values",
        "Collapses: lower learning_rate, raise kl_beta, or take a loss with a higher upper clip "
        "(dapo). Rises without end: lower learning_rate.",
    ),
    MetricNote(
        "rollout/response_len/mean",
        "tokens",
        "Sampled tokens per trained trajectory.",
        "well below max_completion_tokens",
        "Grows towards the limit: look at rollout/truncated_ratio, and consider "
        "training.rewards.soft_overlong_reward.",
    ),
    MetricNote("rollout/response_len/median", "tokens", "The same, median.", "near the mean"),
    MetricNote("rollout/response_len/max", "tokens", "The same, longest.", "any"),
    MetricNote(
        "rollout/response_len/min",
        "tokens",
        "The same, shortest.",
        "above 1",
        "1 or 2 for long: the model has learned to say nothing; does the reward pay for it?",
    ),
    MetricNote(
        "rollout/truncated_ratio",
        "share",
        "Share of completions that were cut by a length limit.",
        "below 0.1",
        "From 0.5 on the run says so: raise max_completion_tokens or max_seq_len, or ask for "
        "shorter answers.",
    ),
    MetricNote(
        "rollout/parse_fail_ratio",
        "share",
        "Share of completions in which the reward found no answer, of those whose reward says so.",
        "falls to below 0.1 in the first steps",
        "Stays high: ask for the form that the reward looks for, or widen its parser.",
    ),
    MetricNote(
        "rollout/reward_disagreement/mean",
        "reward",
        "How far the members of a RewardEnsemble are apart, mean over completions.",
        "does not grow",
        "Grows: the policy has found answers that please some members alone; read such samples.",
    ),
    MetricNote(
        "rollout/reward_disagreement/max",
        "reward",
        "The same, of the completion with the largest.",
        "does not grow",
        "As above.",
    ),
    MetricNote(
        "rollout/samples_completed",
        "completions",
        "Completions of the rows that ended since the last step.",
        "completions_per_prompt for each row",
    ),
    MetricNote(
        "rollout/total_sampled",
        "rows",
        "Rows that ended since the last step, trained or dropped.",
        "prompt_groups_per_step, and more where rows are dropped",
        "Many times that: most sampling is wasted; see rollout/dropped/{reason}.",
    ),
    MetricNote(
        "rollout/valid_prompt_groups",
        "groups",
        "Groups that this step trained.",
        "prompt_groups_per_step; fewer at the end of the rows",
    ),
    MetricNote(
        "rollout/filter_reject_ratio",
        "share",
        "Share of rows that were whole and were dropped, as uniform or by your filter.",
        "below 0.75",
        "As for rollout/group_uniform_ratio.",
    ),
    MetricNote(
        "rollout/dropped/{reason}",
        "rows",
        "Rows dropped for a reason: uniform, filtered, failed, too_few, stale, overlong_prompt, "
        "truncated or one of your own.",
        "0, uniform excepted",
        "overlong_prompt: raise max_seq_len. too_few, failed: see the log. stale: see "
        "async/stale_drops.",
    ),
    MetricNote(
        "rollout/sample_fail_count",
        "rows",
        "Rows without a completion since sampling failed.",
        "0",
        "See the log of the run, then hearth logs of the deployment.",
    ),
    MetricNote(
        "rollout/reward_fail_count",
        "completions",
        "Completions whose reward function raised or was late (reward_errors='drop').",
        "0",
        "See the log: it has the first traceback. Raise reward_timeout_s if they are late.",
    ),
    MetricNote("rollout/fwd_bwd_count", "calls", "Forward and backward calls of the step.", "any"),
    MetricNote(
        "rollout/router_replay_ratio",
        "share",
        "Share of trained samples whose experts are replayed (router_replay).",
        "1",
        "Below: a rollout function with a sampler of its own returns no routing_matrices.",
    ),
    # signal/*
    MetricNote(
        "signal/effective_samples",
        "samples",
        "Trained samples whose advantage is not 0.",
        "above 0",
        "0: the step changes nothing; see rollout/group_uniform_ratio.",
    ),
    MetricNote(
        "signal/effective_ratio",
        "share",
        "Share of trained samples whose advantage is not 0.",
        "above 0.25; 1 in rl_loop, which drops uniform groups",
        "Filter uniform groups (dynamic_filter_fn), or take rows of another difficulty.",
    ),
    MetricNote(
        "signal/useful_row_ratio",
        "share",
        "Share of the rows that ended whose group has an advantage that is not 0.",
        "above 0.25",
        "Lower for no_signal_patience steps' worth of rows: the run ends and says why.",
    ),
    # train/*
    MetricNote("train/step", "steps", "Optimizer steps of the run, this one included.", "any"),
    MetricNote(
        "train/grad_norm",
        "",
        "L2 norm of the whole gradient, before clipping.",
        "stays within ten times its running median",
        "Jumps or NaN: lower learning_rate; look at the loss and at the rewards of that step. "
        "Exactly 0 with an advantage: every token is clipped or masked.",
    ),
    MetricNote(
        "train/grad_norm_post_clip",
        "",
        "The same after clipping to grad_clip_norm.",
        "at most grad_clip_norm",
        "Always grad_clip_norm: every step is clipped, and learning_rate means less than it says.",
    ),
    MetricNote(
        "train/lr",
        "",
        "Learning rate of the step: learning_rate times lr_schedule times the warm-up.",
        "rises over warmup_steps, then falls as lr_schedule says",
    ),
    MetricNote(
        "train/loss",
        "nats",
        "What the step minimizes, before it: in sft_loop the mean cross-entropy per answer token, "
        "in dpo_loop the mean over the pairs.",
        "falls, with the batch's noise; in dpo_loop from ln 2 = 0.693",
        "Rises or jumps: lower learning_rate, add warmup_steps. Flat: raise it.",
    ),
    MetricNote(
        "train/teacher_kl",
        "nats per token",
        "How far the student is from its teacher on its own answers (distillation_loop): the mean "
        "of the student's logprob less the teacher's, or with distill_loss=top_k the KL from the "
        "teacher's probabilities of its teacher_top_k tokens.",
        "falls; single steps of reverse_kl may be below 0",
        "Flat: raise learning_rate or completions_per_prompt. Large from the start: the student's "
        "answers make no sense to the teacher; begin with sft_loop.",
    ),
    MetricNote(
        "train/rows",
        "rows",
        "Rows that the step trained (sft_loop, dpo_loop).",
        "batch_size; fewer at the end",
    ),
    MetricNote(
        "train/accuracy",
        "share",
        "Share of the step's pairs whose chosen answer has the higher reward (dpo_loop).",
        "any at the first step, where all are equal; then above 0.5",
        "Stays near 0.5: raise learning_rate; do the pairs differ in what you think?",
    ),
    MetricNote(
        "train/margin",
        "reward",
        "Mean reward of the chosen answers less that of the rejected ones (dpo_loop).",
        "rises",
        "As for train/accuracy.",
    ),
    MetricNote(
        "train/chosen_reward",
        "reward",
        "dpo_beta times the log ratio of policy to reference, mean over the chosen answers.",
        "above train/rejected_reward; it may fall below 0",
        "Falls far: chosen answers get unlikely, too. Lower learning_rate or raise dpo_beta; "
        "begin with sft_loop on the chosen answers.",
    ),
    MetricNote(
        "train/rejected_reward", "reward", "The same over the rejected answers.", "falls below 0"
    ),
    MetricNote(
        "train/skipped",
        "0 or 1",
        "1 where the gradient was all zeros and the step was left out (zero_gradient_steps).",
        "0",
        "As for signal/effective_samples.",
    ),
    MetricNote(
        "train/mean_loss",
        "loss per token",
        "The objective: policy term plus KL term. With ratios of 1 its value is near 0 whatever is "
        "learned, so it is no measure of progress.",
        "any",
    ),
    MetricNote("train/mean_adv_loss", "loss per token", "The policy term alone.", "any"),
    MetricNote(
        "train/mean_kl_penalty",
        "loss per token",
        "The KL term alone: kl_beta times the KL.",
        "small beside the advantages, which are near 1",
        "Larger than the policy term for long: lower kl_beta.",
    ),
    MetricNote("train/loss_sum", "loss", "The summed loss, before optim_step divides.", "any"),
    MetricNote(
        "train/surrogate_loss_sum",
        "loss",
        "Sum of what the trainer computed its gradient from, where the loss runs in this process.",
        "any",
    ),
    MetricNote(
        "train/ref_kl",
        "nats per token",
        "KL to the frozen reference, k3 estimate: how far the policy has moved.",
        "grows slowly, below 1",
        "From 1 on the run says so: raise kl_beta, set kl_target, or lower learning_rate.",
    ),
    MetricNote(
        "train/mean_kl",
        "nats per token",
        "The same, as the mean log ratio (k1). May be negative.",
        "near train/ref_kl",
    ),
    MetricNote(
        "train/kl_beta",
        "",
        "Weight of the KL in force, where kl_target adapts it.",
        "settles",
        "Grows without end: learning_rate is too high for kl_target.",
    ),
    MetricNote(
        "train/ppo_kl",
        "nats per token",
        "KL from the policy to the policy that the ratio compares it with, k3 estimate.",
        "0 on-policy, below 0.05 otherwise",
        "Higher: fewer ppo_n_minibatches, a smaller weight_sync_interval or "
        "max_head_offpolicy_versions, or a lower learning_rate.",
    ),
    MetricNote(
        "train/ppo_ratio_mean",
        "",
        "Mean ratio of the policy to the one that it is compared with.",
        "1 on-policy, 0.9 to 1.1 otherwise",
        "As for train/ppo_kl.",
    ),
    MetricNote(
        "train/ppo_clip_frac",
        "share",
        "Share of tokens without gradient because of the clip (grpo).",
        "0 on-policy, below 0.2 otherwise",
        "As for train/ppo_kl.",
    ),
    MetricNote("train/dapo_clip_frac", "share", "The same for dapo.", "as train/ppo_clip_frac"),
    MetricNote(
        "train/gspo_clip_frac",
        "share",
        "The same for gspo, whose ratio is a sequence's.",
        "below 0.5",
    ),
    MetricNote(
        "train/cispo_clip_frac",
        "share",
        "Share of weights outside the bounds (cispo).",
        "below 0.2",
    ),
    MetricNote(
        "train/cispo_mask_frac", "share", "Share of masked tokens (cispo_mask).", "below 0.2"
    ),
    MetricNote(
        "train/is_ratio_mean",
        "",
        "Mean ratio to the sampler's policy (importance_sampling, reinforce).",
        "0.9 to 1.1",
        "As for train/inference_kld.",
    ),
    MetricNote(
        "train/is_clip_frac",
        "share",
        "Share of ratios outside ratio_min and ratio_max (importance_sampling).",
        "below 0.2",
        "As for train/ppo_kl.",
    ),
    MetricNote(
        "train/dro_quad_penalty",
        "loss per token",
        "The quadratic term of dro.",
        "small beside the advantages",
    ),
    MetricNote(
        "train/inference_diff",
        "nats per token",
        "Mean difference of the trainer's and the sampler's logprobs, as an absolute value.",
        "below 0.02 on-policy in float32, below 0.1 in bfloat16",
        "See parity/p95.",
    ),
    MetricNote(
        "train/inference_kld",
        "nats per token",
        "KL from the sampler's policy to the trainer's, k3 estimate.",
        "near 0 on-policy",
        "On-policy: see parity/p95. Off-policy: samples are older than the losses bear; lower "
        "max_head_offpolicy_versions.",
    ),
    MetricNote(
        "train/tis/weight_mean",
        "",
        "Mean weight of truncated importance sampling.",
        "0.8 to 1.1",
        "As for train/inference_kld.",
    ),
    MetricNote(
        "train/tis/clip_frac",
        "share",
        "Share of weights above tis.cap.",
        "below 0.1",
        "As for train/inference_kld.",
    ),
    MetricNote(
        "train/tis/icepop_clip_frac",
        "share",
        "Share of tokens left out by tis.icepop_threshold.",
        "below 0.1",
        "As for train/inference_kld.",
    ),
    MetricNote(
        "train/tis/seq_ratio",
        "",
        "Mean ratio of whole sequences (tis.level='sequence').",
        "0.5 to 2",
        "As for train/inference_kld.",
    ),
    MetricNote(
        "train/active_tokens", "tokens", "Trained tokens per call, mean over the calls.", "any"
    ),
    MetricNote(
        "train/active_tokens_sum",
        "tokens",
        "Trained tokens of the step (loss_path='builtin').",
        "any",
    ),
    MetricNote(
        "train/num_loss_tokens",
        "tokens",
        "Tokens with a gradient, as the optimizer counted them.",
        "any",
    ),
    MetricNote("train/num_sequences", "samples", "Samples with a gradient, likewise.", "any"),
    MetricNote(
        "train/denominator",
        "",
        "What the summed gradient was divided by (grad_accumulation_normalization).",
        "any",
    ),
    MetricNote(
        "train/total_resp_tokens",
        "tokens",
        "Tokens from each completion's first on, per call.",
        "any",
    ),
    MetricNote(
        "train/mask_ratio",
        "share",
        "Share of these that the policy sampled: less than 1 where a tool's text is masked.",
        "any",
    ),
    MetricNote(
        "train/num_minibatches", "steps", "Optimizer steps of this batch.", "ppo_n_minibatches"
    ),
    MetricNote(
        "train/effective_grad_accum_steps",
        "calls",
        "Forward and backward calls per optimizer step.",
        "any",
    ),
    # parity/*
    MetricNote(
        "parity/p50",
        "nats",
        "Median difference of the trainer's and the sampler's logprob of a token that the "
        "trainer's own weights sampled.",
        "below 0.01 in float32, below 0.05 in bfloat16",
        "See parity/p95.",
    ),
    MetricNote(
        "parity/p95",
        "nats",
        "The difference that 95 % of the tokens stay below.",
        "below parity_threshold (0.2)",
        "Above it: does the rollout function sample with another temperature, top_p or top_k, does "
        "the deployment quantize, does a mixture of experts need router_replay?",
    ),
    MetricNote("parity/max", "nats", "The largest difference.", "below 1", "As for parity/p95."),
    MetricNote(
        "parity/mean_exp",
        "",
        "Mean of the exponential of the differences.",
        "1 to 1.1",
        "As for parity/p95.",
    ),
    MetricNote("parity/tokens", "tokens", "Tokens that were compared.", "above 50"),
    MetricNote(
        "parity/probes_skipped",
        "probes",
        "Probes that came too late for their step.",
        "0",
        "Often: the deployment is busy; parity is then measured less often. Nothing else is lost.",
    ),
    # version/*
    MetricNote(
        "version/sample_staleness_mean",
        "weight syncs",
        "Age of the trained samples, by their oldest token.",
        "0 on-policy, else at most max_head_offpolicy_versions",
    ),
    MetricNote(
        "version/sample_staleness_max",
        "weight syncs",
        "The same, of the oldest sample.",
        "0 on-policy, else at most max_head_offpolicy_versions",
        "Above with in_flight_weight_updates alone: such samples hold tokens of several versions.",
    ),
    # async/*
    MetricNote(
        "async/version_offset_mean",
        "weight syncs",
        "Syncs between a row's submission and the batch that trains it.",
        "at most max_head_offpolicy_versions",
    ),
    MetricNote(
        "async/version_offset_max",
        "weight syncs",
        "The same, largest.",
        "never above max_head_offpolicy_versions",
    ),
    MetricNote("async/version_offset_min", "weight syncs", "The same, smallest.", "any"),
    MetricNote(
        "async/version_offset_in_flight_mean",
        "weight syncs",
        "The part of the age that passed while the row was sampled.",
        "any",
    ),
    MetricNote(
        "async/version_offset_in_queue_mean",
        "weight syncs",
        "The part that passed while the finished group waited for a batch.",
        "below max_head_offpolicy_versions",
        "Near it, where that is above 1: a smaller max_head_offpolicy_versions is enough.",
    ),
    MetricNote("async/in_flight", "rows", "Rows that are being sampled as the step ends.", "any"),
    MetricNote("async/running_samples", "samples", "The same in samples.", "any"),
    MetricNote(
        "async/accepted_samples", "samples", "Samples accepted since the run began.", "grows"
    ),
    MetricNote(
        "async/ready_groups",
        "groups",
        "Finished groups that wait for a batch.",
        "below prompt_groups_per_step times max_head_offpolicy_versions",
        "Always full: the trainer is slower. Always 0 with an idle trainer: the sampler is.",
    ),
    MetricNote(
        "async/staleness_capacity_at_step",
        "samples",
        "Room that the bound on staleness leaves for new samples.",
        "any",
        "0 with an idle trainer: raise max_head_offpolicy_versions.",
    ),
    MetricNote(
        "async/concurrency_capacity_at_step",
        "samples",
        "Room that max_concurrency_rollout_sample leaves; -1: no limit.",
        "any",
        "0 with an idle trainer: raise max_concurrency_rollout_sample.",
    ),
    MetricNote(
        "async/sample_fails",
        "samples",
        "Rollouts that were given up after their last attempt.",
        "0",
        "See the log; five in a row end the run.",
    ),
    MetricNote(
        "async/empty_samples",
        "samples",
        "Rollouts that returned None or no sampled token.",
        "0",
        "Mostly prompts that do not fit: raise max_seq_len, or look at the rollout function.",
    ),
    MetricNote("async/filter_drops", "rows", "Rows that dynamic_filter_fn left out.", "any"),
    MetricNote(
        "async/stale_drops",
        "rows",
        "Rows dropped since they came too late (late_row_wait_s).",
        "0",
        "Raise late_row_wait_s or max_head_offpolicy_versions: long answers are lost, which biases "
        "the run towards short ones.",
    ),
    MetricNote(
        "async/total_stale_drops", "rows", "The same since the run began.", "0", "As above."
    ),
    MetricNote(
        "async/stale_drop_response_len_mean",
        "tokens",
        "Length of the dropped ones' finished samples.",
        "absent",
        "As above.",
    ),
    MetricNote(
        "async/trained_against_version",
        "weight syncs",
        "Weight version that this step's samples are compared with.",
        "grows by 1",
    ),
    MetricNote(
        "async/realized_training_chunks", "calls", "Pieces in which the batch was trained.", "any"
    ),
    # igpo/*
    MetricNote("igpo/avg_turns", "turns", "Turns per trajectory.", "any"),
    MetricNote(
        "igpo/mean_ig",
        "nats or probability",
        "Mean information gain of a turn: how much it raises the probability of the right answer.",
        "above 0 once something is learned",
        "Stays at or below 0: turns do not help. Is the answer what the row says, and "
        "ig_answer_prefix what the rollout writes before it?",
    ),
    MetricNote(
        "igpo/baseline_logp",
        "nats per token",
        "Logprob of the right answer before the first turn.",
        "below 0",
        "Near 0: the answer is in the prompt.",
    ),
    MetricNote(
        "igpo/unscored_ratio",
        "share",
        "Share of turns without a gain, since scoring failed or the text did not fit.",
        "0",
        "Raise max_seq_len; see the log.",
    ),
    MetricNote("igpo/scoring_time", "seconds", "Time that scoring took.", "any"),
    MetricNote(
        "igpo/scoring_ratio",
        "share",
        "The same as a share of the step.",
        "below 0.3",
        "Raise scoring_batch, or score on the deployment (ig_scorer).",
    ),
    # eval/*
    MetricNote(
        "eval/accuracy",
        "share",
        "Share of held-out completions whose reward is above 0.5; in dpo_loop of held-out pairs "
        "whose chosen answer has the higher reward.",
        "rises with rollout/raw_reward",
        "Falls while training rewards rise: the run learns its rows or a weakness of the reward by "
        "heart. More rows, fewer epochs, a stricter reward.",
    ),
    MetricNote(
        "eval/reward", "reward", "Mean reward of held-out completions.", "rises", "As above."
    ),
    MetricNote(
        "eval/pass@{k}",
        "share",
        "Estimated probability that at least one of k completions is right.",
        "rises; pass@1 faster than the others",
        "The larger k falls while pass@1 rises: answers lose variety; see rollout/entropy.",
    ),
    MetricNote(
        "eval/loss",
        "nats",
        "The loss of the held-out rows: train/loss on rows that are not trained.",
        "falls",
        "Rises while train/loss falls: the rows are learned by heart; fewer epochs, more rows, "
        "lora_rank or weight_decay.",
    ),
    MetricNote("eval/margin", "reward", "train/margin of the held-out pairs.", "rises"),
    MetricNote("eval/chosen_reward", "reward", "The same of their chosen answers.", "any"),
    MetricNote(
        "eval/rejected_reward", "reward", "The same of their rejected answers.", "falls below 0"
    ),
    MetricNote("eval/tokens", "tokens", "Answer tokens of the held-out rows.", "the same always"),
    MetricNote("eval/samples", "completions", "Held-out completions that were scored.", "any"),
    MetricNote(
        "eval/response_len/mean", "tokens", "Their mean length.", "as rollout/response_len/mean"
    ),
    MetricNote(
        "eval/truncated_ratio",
        "share",
        "Share of them that were cut.",
        "below 0.1",
        "As for rollout/truncated_ratio.",
    ),
    MetricNote(
        "eval/parse_fail_ratio",
        "share",
        "Share of them in which the reward found no answer.",
        "below 0.1",
        "As for rollout/parse_fail_ratio.",
    ),
    MetricNote(
        "eval/sample_fail_count",
        "completions",
        "Held-out completions that failed.",
        "0",
        "See the log.",
    ),
    MetricNote(
        "eval/reward_fail_count",
        "completions",
        "Held-out rewards that failed.",
        "0",
        "See the log.",
    ),
    MetricNote(
        "eval/weight_version_mean",
        "weight syncs",
        "Weights that answered, mean over completions; training goes on meanwhile.",
        "any",
    ),
    MetricNote("eval/weight_version_min", "weight syncs", "The oldest of them.", "any"),
    MetricNote("eval/weight_version_max", "weight syncs", "The newest of them.", "any"),
    # batch/*
    MetricNote(
        "batch/mean_samples_per_fwd_bwd",
        "samples",
        "Samples per forward and backward call.",
        "large enough to fill the device",
        "Small on a GPU: raise min_samples_per_fwd_bwd.",
    ),
    MetricNote("batch/mean_prompt_groups_per_fwd_bwd", "groups", "The same in groups.", "any"),
    MetricNote(
        "batch/max_prompt_groups_per_fwd_bwd", "groups", "The same, of the largest call.", "any"
    ),
    MetricNote(
        "batch/min_prompt_groups_per_fwd_bwd", "groups", "The same, of the smallest call.", "any"
    ),
    # perf/*
    MetricNote(
        "perf/step_wall_time", "seconds", "The whole step, from the end of the one before.", "any"
    ),
    MetricNote("perf/step_time", "seconds", "The same, in overlapping recipes.", "any"),
    MetricNote(
        "perf/sample_wait_time",
        "seconds",
        "How long training waited for samples.",
        "the largest part of a synchronous step",
        "Much more than perf/fwd_bwd_time: more replicas, vLLM, or async_rl_loop.",
    ),
    MetricNote("perf/wait_time_ratio", "share", "The same as a share of the step.", "any"),
    MetricNote("perf/fwd_bwd_time", "seconds", "Forward and backward passes.", "any"),
    MetricNote(
        "perf/optim_step_time", "seconds", "Optimizer steps.", "small beside perf/fwd_bwd_time"
    ),
    MetricNote(
        "perf/ref_forward_time",
        "seconds",
        "Forward passes of the reference.",
        "below perf/fwd_bwd_time",
    ),
    MetricNote(
        "perf/old_policy_forward_time",
        "seconds",
        "Forward passes for the logprobs before the step, where a loss needs them.",
        "below perf/fwd_bwd_time",
    ),
    MetricNote("perf/ref_tokens_per_s", "tokens per second", "Rate of the reference.", "any"),
    MetricNote(
        "perf/train_tokens_per_s", "tokens per second", "Rate of training.", "does not fall"
    ),
    MetricNote(
        "perf/rollout_tokens_per_s",
        "tokens per second",
        "Sampled and trained tokens over the time of the step.",
        "does not fall",
    ),
    MetricNote(
        "perf/rollout_samples_per_s", "completions per second", "Rate of sampling.", "does not fall"
    ),
    MetricNote(
        "perf/weight_sync_time",
        "seconds",
        "Saving a snapshot and loading it into the deployment.",
        "below a tenth of the step",
        "Raise weight_sync_interval; publish LoRA adapters; see weight_sync.md on deltas.",
    ),
    MetricNote(
        "perf/weight_sync_ratio",
        "share",
        "The same as a share of the step.",
        "below 0.1",
        "As above.",
    ),
    MetricNote(
        "perf/weight_update_time",
        "seconds",
        "The same, in overlapping recipes.",
        "any",
        "As above.",
    ),
    MetricNote(
        "perf/dcp_save_time", "seconds", "Writing a checkpoint.", "below a fiftieth of the time"
    ),
    MetricNote("perf/eval_time", "seconds", "Held-out evaluation.", "any"),
    MetricNote(
        "perf/record_wait_time",
        "seconds",
        "How long the run waited until recorded samples were written.",
        "near 0",
        "A slow disk: record_samples='sampled:0.1'.",
    ),
    MetricNote(
        "perf/overlap_ratio",
        "share",
        "Share of the step in which trainer and sampler both worked.",
        "near 0 in rl_loop, above 0.5 off-policy",
    ),
    MetricNote(
        "perf/trainer_wait_for_sampler_time",
        "seconds",
        "Time in which the sampler alone worked.",
        "any",
    ),
    MetricNote(
        "perf/sampler_wait_for_trainer_time",
        "seconds",
        "Time in which the trainer alone worked.",
        "any",
    ),
    MetricNote("perf/train_time", "seconds", "The trainer's loop: computing.", "any"),
    MetricNote(
        "perf/train_wait_time", "seconds", "The trainer's loop: waiting for rollouts.", "any"
    ),
    MetricNote(
        "perf/train_chunk_wait_time",
        "seconds",
        "The part of it that comes after a batch's first piece.",
        "any",
    ),
    MetricNote(
        "perf/trainer_idle_ratio",
        "share",
        "Share of the step in which the trainer had nothing to do.",
        "below 0.2 off-policy",
        "See async/staleness_capacity_at_step and async/concurrency_capacity_at_step; with room in "
        "both, more replicas.",
    ),
    MetricNote(
        "perf/sampler_idle_ratio",
        "share",
        "Share of the step in which the sampler had nothing to do.",
        "below 0.5 off-policy",
        "Raise max_head_offpolicy_versions, or give the trainer more of the machine.",
    ),
)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], MetricNote], ...]:
    return tuple(
        (re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(note.name))), note) for note in METRICS
    )


def find_note(name: str) -> MetricNote | None:
    """The entry of a metric, or None where the table has none."""
    return next((note for pattern, note in _patterns() if pattern.fullmatch(name)), None)


def find_unexplained(names: Iterable[str]) -> list[str]:
    """Those names of a record that no entry explains; a record's type and step need none."""
    return [name for name in names if name not in ("type", "step") and find_note(name) is None]
