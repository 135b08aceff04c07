// Server-sent events: a run's files grew, so what is shown is asked for again.
import { useEffect, useState } from "preact/hooks";

// What is shown is asked for again at most this often, and not while nobody sees the page.
const PAUSE_MS = 600;
/** The numbers and curves of a run: asking and drawing takes the processor from a run on the same machine. */
export const RUN_PAUSE_MS = 10000;

const listeners = new Set<Listener>();
const steps = new Map<string, number>();
const watchers = new Set<(connected: boolean) => void>();
let connected = false;
let source: EventSource | null = null;

function setConnected(value: boolean): void {
  connected = value;
  for (const watcher of watchers) watcher(value);
}

function connect(): void {
  if (source) return;
  source = new EventSource("/api/live");
  source.onopen = () => setConnected(true);
  source.onerror = () => setConnected(false);
  source.onmessage = (event: MessageEvent<string>) => {
    const { run, step } = JSON.parse(event.data) as { run: string; step: number | null };
    if (step === null) steps.delete(run);
    else steps.set(run, step);
    for (const listener of listeners) listener.noticeGrowth(run);
  };
  document.addEventListener("visibilitychange", () => {
    for (const listener of listeners) listener.tell();
  });
}

/** Calls back when a run grows, at once where the last call is a pause ago, else after it. */
class Listener {
  private timer = 0;
  private told: number;
  private hasGrown = false;

  constructor(
    private run: string | null,
    private callback: () => void,
    private pause: number,
  ) {
    this.told = -pause;
  }

  noticeGrowth(run: string): void {
    if (this.run !== null && this.run !== run) return;
    this.hasGrown = true;
    this.timer ||= setTimeout(() => this.tell(), this.told + this.pause - performance.now());
  }

  tell(): void {
    this.stop();
    if (document.hidden || !this.hasGrown) return;
    this.hasGrown = false;
    this.told = performance.now();
    this.callback();
  }

  stop(): void {
    clearTimeout(this.timer);
    this.timer = 0;
  }
}

/** Call back when a run's files grow, at most once a pause; `run` null means any run. */
export function onGrowth(run: string | null, callback: () => void, pause = PAUSE_MS): () => void {
  connect();
  const listener = new Listener(run, callback, pause);
  listeners.add(listener);
  return () => {
    listeners.delete(listener);
    listener.stop();
  };
}

/** The last step of a run, as soon as its line is there; before that, the one that is known. */
export function useLastStep(run: string, known: number | null): number | null {
  const [step, setStep] = useState(known);
  useEffect(() => onGrowth(run, () => setStep(steps.get(run) ?? null)), [run]);
  useEffect(() => setStep(known), [run, known]);
  return step;
}

/** Whether the server is reached. */
export function useConnected(): boolean {
  const [value, setValue] = useState(connected);
  useEffect(() => {
    connect();
    setValue(connected);
    watchers.add(setValue);
    return () => void watchers.delete(setValue);
  }, []);
  return value;
}
