// A page of charts with one axis, one cursor and one zoom: of one run, or of several over one another.
import { useMemo, useState } from "preact/hooks";
import type { RunEvent, Series } from "./api";
import { Chart, type Line, type Mark } from "./charts";
import { seriesColor, useDark } from "./colors";
import { formatNumber, formatSeconds } from "./format";
import { setQuery, useRoute } from "./router";
import { EVENTS, Sign } from "./signs";
import { Line as OneLine } from "./text";

export interface Source {
  label: string;
  series: Series;
  events: RunEvent[];
}

interface PlotsProps {
  sources: Source[];
  charts: { title: string; name: string }[];
  onPick?: (step: number) => void;
}

/** How the axis is set up, from the query. */
export function useAxis(): { time: boolean; smoothing: number; zoom: [number, number] | null } {
  const { query } = useRoute();
  const zoom = (query.get("zoom") ?? "").split("~").map(Number);
  const valid = zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0]! < zoom[1]!;
  return {
    time: query.get("axis") === "time",
    smoothing: Math.min(0.99, Math.max(0, Number(query.get("smooth") ?? 0) || 0)),
    zoom: valid ? (zoom as [number, number]) : null,
  };
}

/** The controls of the axis: steps or time, smoothing, and the way out of a zoom. */
export function AxisControls() {
  const { time, smoothing, zoom } = useAxis();
  return (
    <>
      <div class="segments" role="group" aria-label="Axis">
        <button aria-pressed={!time} onClick={() => setQuery({ axis: null, zoom: null })}>
          Steps
        </button>
        <button aria-pressed={time} onClick={() => setQuery({ axis: "time", zoom: null })}>
          Time
        </button>
      </div>
      <label class="check small soft">
        Smoothing
        <input
          type="range"
          min="0"
          max="0.98"
          step="0.02"
          value={smoothing}
          aria-valuetext={smoothing.toFixed(2)}
          onInput={(event) => setQuery({ smooth: Number(event.currentTarget.value) || null })}
        />
        <span class="mono">{smoothing.toFixed(2)}</span>
      </label>
      {zoom && <button onClick={() => setQuery({ zoom: null })}>Reset zoom</button>}
    </>
  );
}

/** Which kinds of events are drawn; each has its sign. */
export function EventControls({ events }: { events: RunEvent[] }) {
  const { query } = useRoute();
  const hidden = hiddenEvents(query);
  const counts = new Map<string, number>();
  for (const event of events) counts.set(event.name, (counts.get(event.name) ?? 0) + 1);
  const toggle = (name: string) => {
    const next = new Set(hidden);
    if (!next.delete(name)) next.add(name);
    setQuery({ hide: [...next].join(",") || "-" });
  };
  return (
    <div class="legend events">
      {[...counts].map(([name, count]) => (
        <button
          key={name}
          class="quiet"
          aria-pressed={!hidden.has(name)}
          title={`Show or hide: ${name}`}
          onClick={() => toggle(name)}
        >
          <Sign path={EVENTS[name] ?? EVENTS["warning"]!} />
          {name.replaceAll("_", " ")}
          <span class="faint">{count}</span>
        </button>
      ))}
    </div>
  );
}

function hiddenEvents(query: URLSearchParams): Set<string> {
  return new Set((query.get("hide") ?? "recording,eval").split(",").filter((name) => name !== "-"));
}

export function Plots({ sources, charts, onPick }: PlotsProps) {
  const { query } = useRoute();
  const { time, smoothing, zoom } = useAxis();
  const dark = useDark();
  const [cursor, setCursor] = useState<number | null>(null);
  const hide = query.get("hide");
  const marks = useMemo(() => placeMarks(sources[0]?.events ?? [], time, hiddenEvents(query)), [sources, time, hide]);
  const whole = useMemo(() => measureRange(sources, time), [sources, time]);
  const lines = useMemo(
    () =>
      charts.map(({ name }) =>
        sources.map((source, place) => makeLine(source, name, place, { time, dark, alone: sources.length === 1 })),
      ),
    [sources, charts.map(({ name }) => name).join(), time, dark],
  );
  const range = zoom ?? whole;
  const pickStep = (x: number) => onPick?.(time ? stepAt(sources[0]!.series, x) : Math.round(x));
  return (
    <>
      <Readout cursor={cursor} time={time} source={sources[0]} range={range} canPick={!!onPick} />
      <div class="charts">
        {charts.map(({ title, name }, place) => (
          <Chart
            key={name}
            title={title}
            name={name}
            lines={lines[place]!}
            marks={marks}
            range={range}
            smoothing={name.startsWith("eval/") ? 0 : smoothing}
            time={time}
            group="page"
            onCursor={setCursor}
            onPick={onPick && pickStep}
            onZoom={(next) => setQuery({ zoom: next && next.map((value) => Number(value.toPrecision(6))).join("~") })}
          />
        ))}
      </div>
    </>
  );
}

/** The letter of the n-th run. */
export function letterOf(place: number): string {
  return String.fromCharCode(65 + place);
}

function makeLine(
  source: Source,
  name: string,
  place: number,
  { time, dark, alone }: { time: boolean; dark: boolean; alone: boolean },
): Line {
  const curve = name.startsWith("eval/") ? source.series.eval : source.series;
  const values = curve.series[name] ?? curve.steps.map(() => null);
  const xs = time ? curve.times.map((seconds) => seconds ?? 0) : curve.steps;
  return {
    label: source.label,
    color: seriesColor(place, dark),
    letter: alone ? undefined : letterOf(place),
    xs,
    values,
  };
}

function placeMarks(events: RunEvent[], time: boolean, hidden: Set<string>): Mark[] {
  return events
    .filter((event) => !hidden.has(event.name))
    .map((event) => ({ x: time ? event.seconds : event.step, event }));
}

function measureRange(sources: Source[], time: boolean): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (const { series } of sources) {
    for (const curve of [series, series.eval]) {
      for (const x of time ? curve.times : curve.steps) {
        if (x === null) continue;
        low = Math.min(low, x);
        high = Math.max(high, x);
      }
    }
  }
  if (!Number.isFinite(low)) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function stepAt(series: Series, seconds: number): number {
  const place = series.times.findIndex((time) => time !== null && time >= seconds);
  return series.steps[place] ?? series.steps[series.steps.length - 1] ?? 0;
}

/** Of each kind the event that is nearest, where one is near enough. */
function nearestEvents(events: RunEvent[], distance: (event: RunEvent) => number, near: number): RunEvent[] {
  const found = new Map<string, RunEvent>();
  for (const event of events) {
    const known = found.get(event.name);
    if (distance(event) <= near && (!known || distance(event) < distance(known))) found.set(event.name, event);
  }
  return [...found.values()];
}

function Readout({
  cursor,
  time,
  source,
  range,
  canPick,
}: {
  cursor: number | null;
  time: boolean;
  source?: Source;
  range: [number, number];
  canPick: boolean;
}) {
  if (cursor === null || !source) {
    return (
      <div class="readout">
        Drag to zoom, double-click to reset.{canPick && " Click a point for the samples of its step."}
      </div>
    );
  }
  const events = nearestEvents(
    source.events,
    (event) => Math.abs((time ? event.seconds : event.step) - cursor),
    (range[1] - range[0]) / 100,
  );
  return (
    <div class="readout">
      <strong>
        {time ? `${formatSeconds(cursor)}, step ${stepAt(source.series, cursor)}` : `Step ${formatNumber(cursor)}`}
      </strong>
      {events.map((event, place) => (
        <span key={place}>
          {" · "}
          {event.name.replaceAll("_", " ")}
          {event.text ? ": " : ""}
          <OneLine text={event.text} />
        </span>
      ))}
    </div>
  );
}
