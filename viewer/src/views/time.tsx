// Lanes of steps in wall time: who sampled, trained, synced, and waited for whom.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { runUrl, useApi, type RunDetail, type Span } from "../api";
import { canvasColors, seriesColor, useDark } from "../colors";
import { formatCount, formatSeconds } from "../format";
import { useKeys } from "../keys";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { Empty, Failure } from "../text";

const LANES = ["sampler", "completions", "trainer", "sync", "loop"];
const LEFT = 84;
const TOP = 28;
const BAR = 22;
/** Completions run side by side by the hundred: their bars are thin. */
const THIN = 5;
const MOST_ROWS = 4;
const MOST_THIN_ROWS = 24;
const FIRST_STEPS = 12;

interface Box {
  span: Span;
  top: number;
  height: number;
}

interface Packed {
  boxes: Box[];
  lanes: { name: string; top: number }[];
  height: number;
}

function laneOf(span: Span): string {
  return span.name === "completion" ? "completions" : span.lane;
}

/** Spans of one lane that overlap go to rows of their own. */
function pack(spans: Span[]): Packed {
  const names = new Set([...LANES, ...spans.map(laneOf)]);
  const boxes: Box[] = [];
  const lanes: Packed["lanes"] = [];
  let top = TOP;
  for (const name of names) {
    const own = spans.filter((span) => laneOf(span) === name).sort((a, b) => a.start - b.start);
    if (own.length === 0) continue;
    // Work that goes on side by side many times is drawn thin.
    const { rows, count } = assignRows(own, MOST_ROWS) ?? assignRows(own, MOST_THIN_ROWS, true)!;
    const height = count > MOST_ROWS || name === "completions" ? THIN : BAR;
    const room = height === THIN ? THIN + 1 : BAR + 4;
    for (const [place, span] of own.entries()) boxes.push({ span, top: top + rows[place]! * room, height });
    lanes.push({ name, top });
    top += Math.max(count * room, 16) + 12;
  }
  return { boxes, lanes, height: top };
}

/** A row for each span such that none overlap; null where that takes more than `most`, unless they may. */
function assignRows(spans: Span[], most: number, crowd = false): { rows: number[]; count: number } | null {
  const ends: number[] = [];
  const rows: number[] = [];
  for (const span of spans) {
    let row = ends.findIndex((end) => end <= span.start + 1e-6);
    if (row < 0 && ends.length < most) row = ends.length;
    if (row < 0 && !crowd) return null;
    if (row < 0) row = ends.indexOf(Math.min(...ends));
    ends[row] = Math.max(ends[row] ?? 0, span.end);
    rows.push(row);
  }
  return { rows, count: ends.length };
}

export function TimeView({ run }: { run: RunDetail }) {
  const { query } = useRoute();
  const last = Math.max(1, run.step ?? 1);
  const to = Math.max(1, Number(query.get("to")) || last);
  const from = Math.max(1, Math.min(to, Number(query.get("from")) || Math.max(1, to - FIRST_STEPS + 1)));
  const byWork = query.get("color") === "work";
  const { data, error } = useApi<{ spans: Span[]; origin: number }>(
    runUrl(run.key, `/timeline?from_step=${from}&to_step=${to}`),
    run.key,
  );
  const [hover, setHover] = useState<Span | null>(null);
  const show = (first: number, final: number) => {
    const start = Math.max(1, Math.round(Math.min(first, last)));
    setQuery({ from: start, to: Math.max(start, Math.min(last, Math.round(final))) });
  };
  const width = to - from + 1;
  const shift = (steps: number) => {
    const start = Math.max(1, Math.min(last - width + 1, from + steps));
    show(start, start + width - 1);
  };
  const zoom = (factor: number) => {
    const wanted = Math.max(1, Math.min(last, Math.round(width * factor)));
    const start = Math.max(1, Math.min(last - wanted + 1, Math.round((from + to) / 2 - wanted / 2 + 0.5)));
    show(start, start + wanted - 1);
  };
  useKeys({
    ArrowLeft: ["Earlier steps", () => shift(-Math.ceil(width / 2))],
    ArrowRight: ["Later steps", () => shift(Math.ceil(width / 2))],
    "+": ["Fewer steps", () => zoom(0.5)],
    "=": ["Fewer steps", () => zoom(0.5)],
    "-": ["More steps", () => zoom(2)],
    Home: ["First steps", () => show(1, width)],
    End: ["Last steps", () => setQuery({ from: null, to: null })],
  });
  return (
    <main class="view">
      <div class="toolbar">
        <span class="soft">Steps</span>
        <input
          type="number"
          aria-label="From step"
          min="1"
          max={last}
          value={from}
          onChange={(event) => show(Number(event.currentTarget.value), Math.max(to, Number(event.currentTarget.value)))}
        />
        <span class="faint">to</span>
        <input
          type="number"
          aria-label="To step"
          min="1"
          max={last}
          value={to}
          onChange={(event) =>
            show(Math.min(from, Number(event.currentTarget.value)), Number(event.currentTarget.value))
          }
        />
        <button onClick={() => shift(-Math.ceil(width / 2))} disabled={from <= 1}>
          Earlier
        </button>
        <button onClick={() => shift(Math.ceil(width / 2))} disabled={to >= last}>
          Later
        </button>
        <button onClick={() => zoom(0.5)} disabled={width <= 1} aria-label="Fewer steps">
          +
        </button>
        <button onClick={() => zoom(2)} disabled={width >= last} aria-label="More steps">
          −
        </button>
        <span class="grow" />
        <div class="segments" role="group" aria-label="Colors">
          <button aria-pressed={!byWork} onClick={() => setQuery({ color: null })}>
            Weight version
          </button>
          <button aria-pressed={byWork} onClick={() => setQuery({ color: "work" })}>
            Work
          </button>
        </div>
      </div>
      {error && !data && <Failure text={error} />}
      {data && data.spans.length === 0 && (
        <Empty title="No times on record for these steps">
          Recipes write <code>timeline.jsonl</code> while they run; runs from before have none.
        </Empty>
      )}
      {data && data.spans.length > 0 && (
        <div class="page">
          <div class="readout">
            {hover
              ? describe(hover)
              : "Point at a bar for its times; a click opens the samples of its step. Hatched bars wait."}
          </div>
          <Lanes
            spans={data.spans}
            byWork={byWork}
            onHover={setHover}
            onPick={(span) =>
              run.has_samples &&
              navigate(
                span.sample
                  ? linkTo(run.key, "sample", span.sample)
                  : `${linkTo(run.key, "samples")}?step_min=${span.step}&step_max=${span.step}`,
              )
            }
          />
          <Totals spans={data.spans} />
        </div>
      )}
    </main>
  );
}

function describe(span: Span): string {
  const who =
    span.name === "wait"
      ? `${span.lane} waits${{ sampler: " for the trainer", trainer: " for the sampler" }[span.lane] ?? ""}`
      : `${span.lane}: ${span.name.replaceAll("_", " ")}`;
  const version = span.version === null ? "" : ` · version ${span.version}`;
  return `${who} · ${formatSeconds(span.end - span.start)} · step ${span.step}${version}`;
}

interface LanesProps {
  spans: Span[];
  byWork: boolean;
  onHover: (span: Span | null) => void;
  onPick: (span: Span) => void;
}

function Lanes({ spans, byWork, onHover, onPick }: LanesProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const dark = useDark();
  const [width, setWidth] = useState(0);
  const packed = useMemo(() => pack(spans), [spans]);
  const start = Math.min(...spans.map((span) => span.start));
  const end = Math.max(...spans.map((span) => span.end), start + 1e-3);
  const works = [...new Set(spans.map((span) => span.name))];
  const { height } = packed;
  const left = (time: number) => LEFT + ((time - start) / (end - start)) * (width - LEFT - 12);
  useEffect(() => {
    const element = canvas.current!.parentElement!;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (width <= LEFT) return;
    const context = prepare(canvas.current!, width, height);
    const colors = canvasColors(dark);
    drawAxis(context, colors, { width, height, seconds: end - start, left: (seconds) => left(start + seconds) });
    context.textAlign = "left";
    for (const lane of packed.lanes) {
      context.fillStyle = colors.text;
      context.font = "12px system-ui, sans-serif";
      context.fillText(lane.name, 0, lane.top + 15);
    }
    for (const { span, top, height: tall } of packed.boxes) {
      const x = left(span.start);
      const wide = Math.max(1, left(span.end) - x);
      const place = byWork ? works.indexOf(span.name) : (span.version ?? 0);
      drawBar(
        context,
        {
          x,
          y: top,
          wide,
          tall,
          waits: span.name === "wait",
          color: seriesColor(place, dark),
          label: span.name.replaceAll("_", " "),
        },
        colors,
        dark,
      );
    }
  }, [packed, width, dark, byWork]);
  const find = (event: MouseEvent): Span | null => {
    const { offsetX, offsetY } = event;
    const hits = packed.boxes.filter(
      ({ span, top, height: tall }) =>
        offsetY >= top &&
        offsetY <= top + tall &&
        offsetX >= left(span.start) - 1 &&
        offsetX <= Math.max(left(span.end), left(span.start) + 1) + 1,
    );
    return hits[hits.length - 1]?.span ?? null;
  };
  return (
    <div>
      <canvas
        ref={canvas}
        class="lanes"
        role="img"
        aria-label="Lanes of steps"
        style={{ height: `${height}px` }}
        onMouseMove={(event) => onHover(find(event))}
        onMouseLeave={() => onHover(null)}
        onClick={(event) => {
          const span = find(event);
          if (span) onPick(span);
        }}
      />
    </div>
  );
}

function prepare(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = canvas.getContext("2d")!;
  context.scale(devicePixelRatio, devicePixelRatio);
  context.clearRect(0, 0, width, height);
  return context;
}

interface Axis {
  width: number;
  height: number;
  seconds: number;
  left: (seconds: number) => number;
}

function drawAxis(context: CanvasRenderingContext2D, colors: ReturnType<typeof canvasColors>, axis: Axis): void {
  const rough = axis.seconds / Math.max(2, axis.width / 140);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough)!;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  for (let seconds = 0; seconds <= axis.seconds; seconds += step) {
    const x = Math.round(axis.left(seconds)) + 0.5;
    context.strokeStyle = colors.grid;
    context.beginPath();
    context.moveTo(x, TOP - 8);
    context.lineTo(x, axis.height);
    context.stroke();
    context.fillStyle = colors.faint;
    context.fillText(formatSeconds(seconds), x, 12);
  }
}

interface Bar {
  x: number;
  y: number;
  wide: number;
  tall: number;
  waits: boolean;
  color: string;
  label: string;
}

function drawBar(
  context: CanvasRenderingContext2D,
  bar: Bar,
  colors: ReturnType<typeof canvasColors>,
  dark: boolean,
): void {
  const { x, y, wide, tall } = bar;
  context.save();
  context.beginPath();
  context.roundRect(x, y, Math.max(1, wide - 1), tall, Math.min(3, wide / 2, tall / 3));
  context.clip();
  if (bar.waits) {
    context.fillStyle = colors.grid;
    context.fillRect(x, y, wide, tall);
    context.strokeStyle = dark ? "#4a505c" : "#c3c8d2";
    context.beginPath();
    for (let line = x - tall; line < x + wide; line += 6) {
      context.moveTo(line, y + tall);
      context.lineTo(line + tall, y);
    }
    context.stroke();
  } else {
    context.fillStyle = bar.color;
    context.fillRect(x, y, wide, tall);
  }
  context.font = "11px system-ui, sans-serif";
  if (tall === BAR && context.measureText(bar.label).width + 10 < wide) {
    context.fillStyle = bar.waits ? colors.text : dark ? "#14161a" : "#ffffff";
    context.textAlign = "left";
    context.fillText(bar.label, x + 5, y + 15);
  }
  context.restore();
}

interface Total {
  lane: string;
  name: string;
  seconds: number;
  count: number;
  busy: number;
  until: number;
}

/** Of each work in sight: seconds in all, and the share of the time in which at least one was under way. */
function Totals({ spans }: { spans: Span[] }) {
  const whole = Math.max(...spans.map((span) => span.end)) - Math.min(...spans.map((span) => span.start)) || 1;
  const totals = new Map<string, Total>();
  for (const { lane, name, start, end } of [...spans].sort((a, b) => a.start - b.start)) {
    const total = totals.get(`${lane} ${name}`) ?? { lane, name, seconds: 0, count: 0, busy: 0, until: 0 };
    total.seconds += end - start;
    total.count++;
    total.busy += Math.max(0, end - Math.max(start, total.until));
    total.until = Math.max(total.until, end);
    totals.set(`${lane} ${name}`, total);
  }
  return (
    <section class="panel totals">
      <table class="plain">
        <thead>
          <tr>
            <th>Lane</th>
            <th>Work</th>
            <th class="number">Times</th>
            <th class="number">In all</th>
            <th class="number">Busy</th>
            <th />
          </tr>
        </thead>
        <tbody>
          {[...totals.values()]
            .sort((a, b) => b.busy - a.busy)
            .map(({ lane, name, seconds, count, busy }) => (
              <tr key={lane + name}>
                <td>{lane}</td>
                <td>{name.replaceAll("_", " ")}</td>
                <td class="number">{formatCount(count)}</td>
                <td class="number">{formatSeconds(seconds)}</td>
                <td class="number">{((100 * busy) / whole).toFixed(1)} %</td>
                <td>
                  <span class="meter">
                    <i style={{ width: `${(100 * busy) / whole}%` }} />
                  </span>
                </td>
              </tr>
            ))}
        </tbody>
      </table>
    </section>
  );
}
