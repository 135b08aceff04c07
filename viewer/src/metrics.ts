// The twelve curves that matter first, and the metrics that each is looked for in.
export interface Leading {
  title: string;
  names: string[];
}

export const LEADING: Leading[] = [
  { title: "Reward", names: ["rollout/raw_reward", "rollout/reward"] },
  { title: "Held-out accuracy", names: ["eval/accuracy", "eval/reward"] },
  { title: "KL", names: ["train/teacher_kl", "train/ref_kl", "train/mean_kl", "train/ppo_kl", "train/inference_kld"] },
  { title: "Entropy", names: ["rollout/entropy"] },
  { title: "Gradient norm", names: ["train/grad_norm"] },
  { title: "Clipped share", names: ["train/ppo_clip_frac", "train/clip_frac", "tis/clip_frac"] },
  { title: "Parity, p95", names: ["parity/p95", "train/inference_diff"] },
  { title: "Staleness", names: ["version/sample_staleness_mean", "version/sample_staleness_max"] },
  { title: "Length", names: ["rollout/response_len/mean"] },
  { title: "Truncated share", names: ["rollout/truncated_ratio"] },
  { title: "Signal share", names: ["signal/useful_row_ratio", "signal/effective_ratio"] },
  { title: "Samples per second", names: ["perf/rollout_samples_per_s"] },
];

/** Those of a run that samples nothing: it trains on given answers. */
export const SUPERVISED: Leading[] = [
  { title: "Loss", names: ["train/loss"] },
  { title: "Held-out loss", names: ["eval/loss"] },
  { title: "Preferred", names: ["train/accuracy"] },
  { title: "Preferred, held-out", names: ["eval/accuracy"] },
  { title: "Margin", names: ["train/margin"] },
  { title: "Learning rate", names: ["train/lr"] },
  { title: "Gradient norm", names: ["train/grad_norm"] },
  { title: "Trained tokens per second", names: ["perf/train_tokens_per_s"] },
  { title: "Seconds of a step", names: ["perf/step_wall_time"] },
];

/** The curves that matter first, for a run with these metrics. */
export function chooseLeading(metrics: Set<string>): Leading[] {
  const samples = [...metrics].some((name) => name.startsWith("rollout/"));
  if (samples || !metrics.has("train/loss")) return LEADING;
  return SUPERVISED.filter(({ names }) => names.some((name) => metrics.has(name)));
}

/** The metric that a leading curve shows for a run with these metrics; the first name where it has none. */
export function chooseName(leading: Leading, metrics: Set<string>): string {
  return leading.names.find((name) => metrics.has(name)) ?? leading.names[0]!;
}
