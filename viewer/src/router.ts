// URLs: every view is a path, everything that it shows is in the query.
import { useEffect, useState } from "preact/hooks";

const listeners = new Set<() => void>();
// Browsers ignore more than some hundred changes of the history in a while, so refinements are written late.
const WRITE_MS = 150;
let here = location.pathname + location.search;
let timer = 0;

function announce(): void {
  for (const listener of listeners) listener();
}

function write(): void {
  clearTimeout(timer);
  timer = 0;
  if (here !== location.pathname + location.search) history.replaceState(null, "", here);
}

addEventListener("popstate", () => {
  clearTimeout(timer);
  here = location.pathname + location.search;
  announce();
});

/** Show the view of a URL. A view that only refines itself replaces its place in the history. */
export function navigate(url: string, replace = false): void {
  if (url === here) return;
  if (replace) {
    here = url;
    clearTimeout(timer);
    timer = setTimeout(write, WRITE_MS);
  } else {
    write();
    here = url;
    history.pushState(null, "", url);
  }
  announce();
}

/** The whole URL of what is shown, to be handed on. */
export function currentLink(): string {
  return location.origin + here;
}

function parseHere(): [path: string, query: string] {
  const mark = here.indexOf("?");
  return mark < 0 ? [here, ""] : [here.slice(0, mark), here.slice(mark + 1)];
}

/** The path's segments, decoded, and the query; renders again when they change. */
export function useRoute(): { path: string[]; query: URLSearchParams } {
  const [, render] = useState(0);
  useEffect(() => {
    const listener = () => render((count) => count + 1);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  const [path, query] = parseHere();
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(segment: string): string {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}

export type Changes = Record<string, string | number | boolean | null | undefined>;

/** Write changes into this view's query; an empty value removes its name. */
export function setQuery(changes: Changes): void {
  const [path, query] = parseHere();
  const text = withChanges(new URLSearchParams(query), changes).toString();
  navigate(path + (text ? `?${text}` : ""), true);
}

/** A copy of the query with changes; an empty value removes its name. */
export function withChanges(query: URLSearchParams, changes: Changes): URLSearchParams {
  const copy = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "" || value === false) copy.delete(name);
    else copy.set(name, value === true ? "1" : String(value));
  }
  return copy;
}

/** The URL of a view of a run. */
export function linkTo(run: string, ...segments: (string | number)[]): string {
  return ["/run", encodeURIComponent(run), ...segments.map((segment) => encodeURIComponent(segment))].join("/");
}

/** Follow links to views of this page without loading it anew. */
export function followLinks(event: MouseEvent): void {
  if (event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey) return;
  const anchor = (event.target as Element | null)?.closest?.("a");
  if (!anchor || anchor.target || anchor.hasAttribute("download") || anchor.origin !== location.origin) return;
  if (anchor.pathname.startsWith("/api/")) return;
  event.preventDefault();
  navigate(anchor.pathname + anchor.search);
}
