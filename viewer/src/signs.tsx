// Signs beside colors: states of runs, outcomes of samples, events of a run. Paths of a 12 by 12 box.
const CIRCLE = "M6 1.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9z";
const CHECK = "M1.8 6.4 4.7 9.3 10.2 2.9 9 1.9 4.6 7 2.9 5.3z";
const CROSS = "M2 3.1 3.1 2 6 4.9 8.9 2 10 3.1 7.1 6 10 8.9 8.9 10 6 7.1 3.1 10 2 8.9 4.9 6z";
const SQUARE = "M2.5 2.5h7v7h-7z";
const DIAMOND = "M6 .8 11.2 6 6 11.2.8 6z";
const TRIANGLE = "M6 1.2 11.2 10.6H.8z";
const PAUSE = "M2.5 2h2.4v8H2.5zM7.1 2h2.4v8H7.1z";
const TICK = "M5.2 1h1.6v10H5.2z";
const BAR = "M1.5 4.6h9v2.8h-9z";
const EQUAL = "M2 3.2h8v1.7H2zM2 7.1h8v1.7H2z";
const FUNNEL = "M1.5 2h9L7.2 6.3V10l-2.4-1.3V6.3z";
const SCISSORS = "M1.5 5.2h6V2.4L11 6 7.5 9.6V6.8h-6z";
const CLOCK = "M6 1a5 5 0 1 0 0 10A5 5 0 0 0 6 1zm.7 2v2.6l1.9 1.2-.7 1.1-2.5-1.5V3z";
const RING = "M6 1.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9zm0 2a2.5 2.5 0 1 1 0 5 2.5 2.5 0 0 1 0-5z";

type Tone = "strong" | "warn" | "";

const STATES: Record<string, [string, Tone]> = {
  running: [CIRCLE, "strong"],
  ended: [CHECK, ""],
  failed: [CROSS, "warn"],
  killed: [SQUARE, "warn"],
  stalled: [PAUSE, "warn"],
};

const OUTCOMES: Record<string, [string, Tone]> = {
  trained: [CHECK, "strong"],
  evaluated: [RING, "strong"],
  uniform: [EQUAL, ""],
  filtered: [FUNNEL, ""],
  failed: [CROSS, "warn"],
  truncated: [SCISSORS, "warn"],
  stale: [CLOCK, "warn"],
  dropped: [CROSS, ""],
};

/** All outcomes that a sample can have, in the order in which they are listed. */
export const OUTCOME_NAMES = Object.keys(OUTCOMES);

/** The sign of each kind of event. */
export const EVENTS: Record<string, string> = {
  start: CIRCLE,
  resume: TRIANGLE,
  end: CHECK,
  failed: CROSS,
  killed: BAR,
  checkpoint: SQUARE,
  weight_sync: TICK,
  eval: RING,
  warning: DIAMOND,
  recording: DIAMOND,
};

export function Sign({ path }: { path: string }) {
  return (
    <svg viewBox="0 0 12 12" aria-hidden="true">
      <path d={path} fill="currentColor" fill-rule="evenodd" />
    </svg>
  );
}

/** A run's state: sign and word. */
export function State({ state, text }: { state: string; text?: string }) {
  const [path, tone] = STATES[state] ?? [DIAMOND, ""];
  return (
    <span class={`state ${tone}`} title={text || undefined}>
      <Sign path={path} />
      {state}
    </span>
  );
}

/** What became of a sample: sign and word. */
export function Outcome({ outcome, reason }: { outcome: string; reason?: string | null }) {
  const [path, tone] = OUTCOMES[outcome] ?? [DIAMOND, ""];
  return (
    <span class={`state ${tone}`} title={reason ?? undefined}>
      <Sign path={path} />
      {outcome}
    </span>
  );
}
