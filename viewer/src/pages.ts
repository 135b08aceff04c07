// Long lists come in pages: what is in sight is asked for, what was seen is kept.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { fetchJson } from "./api";
import { onGrowth } from "./live";

const SIZE = 200;

export interface Pages<Row> {
  total: number | null;
  queryMs: number | null;
  error: string | null;
  row: (place: number) => Row | null;
  onSight: (first: number, last: number) => void;
}

interface Loaded<Row> {
  url: string;
  total: number | null;
  queryMs: number | null;
  error: string | null;
  pages: Map<number, Row[]>;
}

/** The rows of a URL that answers {total, rows} for offset and limit; asked for again when the run grows. */
export function usePages<Row>(url: string, run: string): Pages<Row> {
  const [loaded, setLoaded] = useState<Loaded<Row>>({ url, total: null, queryMs: null, error: null, pages: new Map() });
  const sight = useRef<[number, number]>([0, 40]);
  const asked = useRef(new Set<number>());
  const current = useRef(url);

  const ask = async (page: number) => {
    asked.current.add(page);
    try {
      const answer = await fetchJson<{ total: number; rows: Row[]; query_ms?: number }>(
        `${url}${url.includes("?") ? "&" : "?"}offset=${page * SIZE}&limit=${SIZE}`,
      );
      if (current.current !== url) return;
      setLoaded((last) => ({
        url,
        total: answer.total,
        queryMs: answer.query_ms ?? null,
        error: null,
        pages: new Map(last.url === url ? last.pages : []).set(page, answer.rows),
      }));
    } catch (error) {
      asked.current.delete(page);
      if (current.current === url) setLoaded((last) => ({ ...last, error: (error as Error).message }));
    }
  };
  const askForSight = () => {
    const [first, last] = sight.current;
    for (let page = Math.floor(first / SIZE); page <= Math.floor(last / SIZE); page++)
      if (!asked.current.has(page)) void ask(page);
  };
  // Asked for before the next frame is drawn, not after it.
  useLayoutEffect(() => {
    current.current = url;
    asked.current = new Set();
    sight.current = [0, 40];
    askForSight();
    return onGrowth(run, () => {
      // Pages out of sight may have moved: they are asked for when they come into sight again.
      const [first, last] = sight.current.map((place) => Math.floor(place / SIZE)) as [number, number];
      asked.current = new Set();
      setLoaded((before) => ({
        ...before,
        pages: new Map([...before.pages].filter(([page]) => page >= first && page <= last)),
      }));
      askForSight();
    });
  }, [url, run]);
  return {
    total: loaded.total,
    queryMs: loaded.queryMs,
    error: loaded.error,
    row: (place) => loaded.pages.get(Math.floor(place / SIZE))?.[place % SIZE] ?? null,
    onSight: (first, last) => {
      sight.current = [first, Math.max(first, last)];
      askForSight();
    },
  };
}
