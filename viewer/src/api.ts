// The server's answers, typed as docs/viewer.md describes them, and how views ask for them.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { onGrowth } from "./live";

export type Value = number | null;
export type Scalar = string | number | boolean | null;

export interface Run {
  /** The name in URLs; differs between the runs of a table. */
  key: string;
  name: string;
  path: string;
  state: "running" | "ended" | "failed" | "killed" | "stalled";
  /** What the last event says, as the error of a failed run. */
  state_text: string;
  recipe: string | null;
  base_model: string | null;
  policy_loss: string | null;
  step: number | null;
  rows_done: number | null;
  rows_total: number | null;
  reward: Value;
  loss: Value;
  held_out: Value;
  started: Value;
  updated: Value;
  duration_s: Value;
  samples: number;
  has_samples: boolean;
  resumes: number;
  spark: Value[];
  differs: Record<string, unknown>;
}

export interface RunDetail extends Run {
  config: Record<string, unknown>;
  changed: Record<string, [unknown, unknown]>;
  metrics: string[];
  evaluations: { step: number; accuracy: Value; reward: Value; loss: Value }[];
  versions: [number, number][];
  recording: { bytes: number; files: number; text: string } | null;
  rescored: string[];
}

export interface Curve {
  steps: number[];
  times: Value[];
  series: Record<string, Value[]>;
}

export interface Series extends Curve {
  eval: Curve;
}

export interface RunEvent {
  time: number;
  seconds: number;
  step: number;
  name: string;
  text: string;
}

export interface Span {
  lane: string;
  name: string;
  start: number;
  end: number;
  step: number;
  version: number | null;
  rows: number[] | null;
  /** The sample whose sampling it was. */
  sample?: string;
}

export interface SampleRow {
  id: string;
  kind: string;
  step: number;
  index: number;
  row: number;
  epoch: number;
  completion: number;
  segment: number;
  reward: Value;
  advantage: Value;
  outcome: string;
  reason: string | null;
  finish_reason: string;
  length: number;
  prompt_len: number;
  turns: number;
  tool_calls: number;
  mean_logprob: Value;
  version: number | null;
  parsed: boolean | null;
  started: Value;
  sample_s: Value;
  score_s: Value;
  text: string;
  prompt_end: string;
  /** Where `text` begins in the whole text; behind 0 it is the excerpt around a match. */
  text_start: number;
  /** UTF-16 places in `text` or, where `match_in` says so, in `prompt_end`. */
  match: [number, number] | null;
  match_in: "text" | "prompt" | null;
  rescored?: Value;
}

export interface SamplePage {
  total: number;
  rows: SampleRow[];
  query_ms: number;
}

export interface Histogram {
  edges: number[];
  counts: number[];
  missing: number;
}

export interface Group {
  prompt: string;
  ground_truth: string | null;
  row: number;
  epoch: number;
  step: number;
  outcome: string;
  rewards: Value[];
  mean: Value;
  std: Value;
  samples: SampleRow[];
}

export interface PromptRow {
  row: number;
  kind: string;
  prompt_end: string;
  times: number;
  first_reward: Value;
  last_reward: Value;
  best: Value;
  solved_share: Value;
}

export interface PromptHistory {
  prompt: string;
  ground_truth: string | null;
  steps: { step: number; epoch: number; index: number; mean: Value; samples: SampleRow[] }[];
}

export interface Part {
  role: string;
  start: number;
  end: number;
  sampled: boolean;
  text: string;
  tool_call: boolean;
}

export interface Tokens {
  ids: number[];
  texts: (string | null)[];
  bytes: (string | null)[];
  special: number[];
}

export type TokenValues = Record<string, (number | boolean | null)[] | undefined>;

export interface Sample extends Omit<SampleRow, "text_start" | "match" | "match_in"> {
  run: string;
  prompt: string;
  ground_truth: string | null;
  metadata: unknown;
  reward_parts: Record<string, Value> | null;
  seeds: (number | string)[];
  started: Value;
  score_s: Value;
  neighbors: { previous: string | null; next: string | null };
  tokens: Tokens;
  mask: boolean[];
  values: TokenValues;
  parts: Part[];
  settings: Record<string, Scalar>;
  again: { possible: boolean; reason: string };
}

export interface Comparison {
  config: { field: string; values: unknown[] }[];
  /** Where each further run parts from the first. */
  parts: {
    run: string;
    /** Of the metric or the sample, whichever is earlier; null where the runs are equal. */
    step: number | null;
    metric: string | null;
    metric_step: number | null;
    sample: string | null;
    /** The run that has no such sample. */
    missing_in: string | null;
    token: number | null;
    reason: string;
  }[];
}

export interface Job {
  state: "running" | "done" | "failed";
  text: string;
  answers: { text: string; tokens: number[]; equal: boolean | null; seed: number | string; reward?: Value }[];
}

/** The API's URL of a run. */
export function runUrl(run: string, rest = ""): string {
  return `/api/runs/${encodeURIComponent(run)}${rest}`;
}

/** An answer of the server. Raises an error with the server's message. */
export async function fetchJson<T>(url: string, init?: RequestInit): Promise<T> {
  let response: Response;
  try {
    response = await fetch(url, init);
  } catch (error) {
    if (init?.signal?.aborted) throw error;
    throw new Error(
      "The viewer's server does not answer. Start it again with `hearth view`, and open the URL that it prints.",
    );
  }
  if (response.ok) return (await response.json()) as T;
  const body = (await response.json().catch(() => null)) as { error?: { message?: string } } | null;
  throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

export interface Answer<T> {
  data: T | null;
  error: string | null;
  /** True while an answer for the present URL is under way. */
  pending: boolean;
}

/**
 * The answer of a URL, null for none. While the next URL's answer is under way the last one stays.
 * With `live` it is asked for again when that run grows ("*": any run), once a `pause` of milliseconds at
 * most. `fetchAll` asks for more with it.
 */
export function useApi<T>(
  url: string | null,
  live?: string,
  fetchAll: (url: string, init: RequestInit) => Promise<T> = fetchJson<T>,
  pause?: number,
): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T> & { url: string | null }>({
    data: null,
    error: null,
    pending: true,
    url: null,
  });
  const stale = useRef(false);
  // Asked for before the next frame is drawn, not after it.
  useLayoutEffect(() => {
    if (url === null) return;
    const abort = new AbortController();
    let busy = false;
    const ask = async () => {
      if (busy) {
        stale.current = true;
        return;
      }
      busy = true;
      stale.current = false;
      try {
        const data = await fetchAll(url, { signal: abort.signal });
        if (!abort.signal.aborted) setAnswer({ data, error: null, pending: false, url });
      } catch (error) {
        if (!abort.signal.aborted)
          setAnswer((last) => {
            const data = last.url === url ? last.data : null;
            return { data, error: (error as Error).message, pending: false, url };
          });
      }
      busy = false;
      if (stale.current && !abort.signal.aborted) void ask();
    };
    void ask();
    const stop = live ? onGrowth(live === "*" ? null : live, () => void ask(), pause) : null;
    return () => {
      abort.abort();
      stop?.();
    };
  }, [url, live]);
  return { data: answer.data, error: answer.error, pending: url !== null && answer.url !== url };
}
