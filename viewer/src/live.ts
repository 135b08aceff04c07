// Server-sent events: a run's files grew, so what is shown is asked for again.
import { useEffect, useState } from "preact/hooks";

export interface Growth {
  run: string;
  step: number;
  state: string;
}

const listeners = new Set<(growth: Growth) => void>();
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
    const growth = JSON.parse(event.data) as Growth;
    for (const listener of listeners) listener(growth);
  };
}

/** Call back when a run's files grow; `run` null means any run. */
export function onGrowth(run: string | null, callback: () => void): () => void {
  connect();
  const listener = (growth: Growth) => {
    if (run === null || growth.run === run) callback();
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
