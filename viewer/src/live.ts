// Server-sent events: a run's files grew, so what is shown is asked for again.
import { useEffect, useState } from "preact/hooks";

// What is shown is asked for again at most this often, and not while nobody sees the page.
const PAUSE_MS = 600;
/** Charts, whose drawing takes the processor from a run beside the browser. */
export const CHARTS_PAUSE_MS = 5000;

const listeners = new Set<Listener>();
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
    const { run } = JSON.parse(event.data) as { run: string };
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
