// Server-sent events: a run's files grew, so what is shown is asked for again.
import { useEffect, useState } from "preact/hooks";

// What is shown is asked for again at most this often, and not while nobody sees the page.
const PAUSE_MS = 600;

const listeners = new Set<(run: string) => void>();
const grown = new Set<string>();
let timer = 0;
let told = -PAUSE_MS;
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
    grown.add((JSON.parse(event.data) as { run: string }).run);
    timer ||= setTimeout(tell, told + PAUSE_MS - performance.now());
  };
  document.addEventListener("visibilitychange", tell);
}

function tell(): void {
  timer = 0;
  if (document.hidden || grown.size === 0) return;
  told = performance.now();
  const runs = [...grown];
  grown.clear();
  for (const run of runs) for (const listener of listeners) listener(run);
}

/** Call back when a run's files grow; `run` null means any run. */
export function onGrowth(run: string | null, callback: () => void): () => void {
  connect();
  const listener = (name: string) => {
    if (run === null || name === run) callback();
  };
  listeners.add(listener);
  return () => void listeners.delete(listener);
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
