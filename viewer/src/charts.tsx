// Curves over steps or time, sparks and histograms.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Histogram as Counts, RunEvent, Value } from "./api";
import { canvasColors, useDark } from "./colors";
import { formatNumber, formatSeconds } from "./format";
import { EVENTS } from "./signs";

export interface Line {
  label: string;
  color: string;
  /** A letter that stands at the end of the line. */
  letter?: string;
  xs: number[];
  values: Value[];
}

export interface Mark {
  x: number;
  event: RunEvent;
}

export interface ChartProps {
  title: string;
  name?: string;
  lines: Line[];
  marks: Mark[];
  range: [number, number];
  smoothing: number;
  time: boolean;
  group: string;
  onZoom: (range: [number, number] | null) => void;
  onCursor?: (x: number | null) => void;
  onPick?: (x: number) => void;
}

/** An exponential moving average that starts at the first value; 0 leaves the values as they are. */
export function smooth(values: Value[], weight: number): Value[] {
  if (weight <= 0) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

function joinLines(lines: Line[], smoothing: number): uPlot.AlignedData {
  const tables = lines.flatMap((line) => {
    const plain: uPlot.AlignedData = [line.xs, line.values];
    return smoothing > 0 ? [plain, [line.xs, smooth(line.values, smoothing)] as uPlot.AlignedData] : [plain];
  });
  if (tables.length === 0) return [[]];
  if (lines.length === 1) return [tables[0]![0], ...tables.map((table) => table[1]!)] as uPlot.AlignedData;
  return uPlot.join(tables);
}

function drawMarks(plot: uPlot, marks: Mark[], colors: ReturnType<typeof canvasColors>): void {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio;
  const ends: Record<string, number> = {};
  ctx.save();
  for (const { x, event } of marks) {
    const left = plot.valToPos(x, "x", true);
    const loud = ["resume", "failed", "killed", "warning"].includes(event.name);
    // Signs of one kind that would touch are left out.
    if (
      left < bbox.left - 1 ||
      left > bbox.left + bbox.width + 1 ||
      left - (ends[event.name] ?? -99) < (loud ? 4 : 9) * ratio
    )
      continue;
    ends[event.name] = left;
    ctx.fillStyle = loud ? "#dd7a1f" : colors.faint;
    ctx.globalAlpha = 0.8;
    ctx.strokeStyle = ctx.fillStyle;
    if (loud) {
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    const size = event.name === "weight_sync" ? 5 : 8;
    ctx.save();
    ctx.translate(left - (size / 2) * ratio, bbox.top + bbox.height - (size + 1) * ratio);
    ctx.scale((size / 12) * ratio, (size / 12) * ratio);
    ctx.fill(new Path2D(EVENTS[event.name] ?? EVENTS["warning"]!));
    ctx.restore();
  }
  ctx.restore();
}

/** The letter of each line at its last point in sight. */
function drawLetters(plot: uPlot, lines: Line[]): void {
  const ratio = devicePixelRatio;
  plot.ctx.save();
  plot.ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  for (const [place, { letter, color, xs, values }] of lines.entries()) {
    if (!letter) continue;
    const last = values.findLastIndex((value, at) => value !== null && xs[at]! <= (plot.scales["x"]!.max ?? Infinity));
    if (last < 0) continue;
    plot.ctx.fillStyle = color;
    plot.ctx.fillText(
      letter,
      plot.valToPos(xs[last]!, "x", true) + (3 + place * 9) * ratio,
      plot.valToPos(values[last]!, "y", true) + 4 * ratio,
    );
  }
  plot.ctx.restore();
}

/** One chart: drag zooms all charts of the group, the cursor is common, a click or Enter picks a step. */
export function Chart(props: ChartProps) {
  const { lines, range, smoothing, time } = props;
  const box = useRef<HTMLDivElement>(null);
  const now = useRef<HTMLSpanElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  // A chart out of sight is drawn when it comes into sight.
  const sight = useRef({ seen: true, missed: false });
  const dark = useDark();
  const empty = lines.every((line) => line.values.every((value) => value === null));
  const shape = lines.map((line) => `${line.label}${line.color}`).join() + (smoothing > 0);

  const showValue = (place: number | null) => {
    const line = latest.current.lines[0];
    if (!now.current || !line) return;
    const smoothed = () => smooth(line.values, latest.current.smoothing);
    const value =
      place === null ? lastNumber(smoothed()) : (plot.current?.data[latest.current.smoothing > 0 ? 2 : 1]?.[place] as Value);
    now.current.textContent = latest.current.lines.length > 1 ? "" : formatNumber(value);
  };

  const draw = () => {
    sight.current.missed = false;
    plot.current?.setData(joinLines(latest.current.lines, latest.current.smoothing));
  };

  useEffect(() => {
    const element = box.current;
    if (empty || !element) return;
    const colors = canvasColors(dark);
    const axis: uPlot.Axis = {
      stroke: colors.faint,
      font: "11px system-ui, sans-serif",
      grid: { stroke: colors.grid, width: 1 },
      ticks: { show: false },
      gap: 4,
    };
    const options: uPlot.Options = {
      width: element.clientWidth,
      height: chooseHeight(element.clientWidth),
      legend: { show: false },
      padding: [12, props.lines.length > 1 ? 12 + 9 * props.lines.length : 18, 0, 0],
      cursor: {
        y: false,
        sync: { key: props.group, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
      },
      scales: { x: { time: false, range: () => latest.current.range }, y: { range: (_, low, high) => pad(low, high) } },
      axes: [
        {
          ...axis,
          size: 24,
          space: 64,
          values: (_, ticks) =>
            ticks.map((tick) =>
              latest.current.time ? formatSeconds(tick) : Number.isInteger(tick) ? formatNumber(tick) : "",
            ),
        },
        { ...axis, size: 52, space: 32, values: (_, ticks) => ticks.map(formatNumber) },
      ],
      series: [{}, ...lines.flatMap((line) => drawLine(line, smoothing > 0))],
      hooks: {
        draw: [
          (chart) => drawMarks(chart, latest.current.marks, colors),
          (chart) => drawLetters(chart, latest.current.lines),
        ],
        setCursor: [
          (chart) => {
            const place = chart.cursor.idx ?? null;
            showValue(place);
            if (chart.cursor.event) latest.current.onCursor?.(place === null ? null : chart.data[0]![place]!);
          },
        ],
        setSelect: [
          (chart) => {
            const { left, width } = chart.select;
            if (width > 4) latest.current.onZoom([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
            chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    };
    const chart = new uPlot(options, joinLines(latest.current.lines, smoothing), element);
    plot.current = chart;
    showValue(null);
    const pick = () => {
      if (chart.cursor.idx != null) latest.current.onPick?.(chart.data[0]![chart.cursor.idx]!);
    };
    let pressed = 0;
    chart.over.addEventListener("mousedown", (event) => void (pressed = event.clientX));
    chart.over.addEventListener("click", (event) => Math.abs(event.clientX - pressed) < 4 && pick());
    chart.over.addEventListener("dblclick", () => latest.current.onZoom(null));
    chart.over.addEventListener("mouseleave", () => latest.current.onCursor?.(null));
    const observer = new ResizeObserver(() =>
      chart.setSize({ width: element.clientWidth, height: chooseHeight(element.clientWidth) }),
    );
    observer.observe(element);
    const watcher = new IntersectionObserver((entries) => {
      sight.current.seen = entries[entries.length - 1]!.isIntersecting;
      if (sight.current.seen && sight.current.missed) draw();
    });
    watcher.observe(element);
    return () => {
      observer.disconnect();
      watcher.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, dark, empty]);

  useEffect(() => {
    if (sight.current.seen) draw();
    else sight.current.missed = true;
    showValue(null);
  }, [lines, smoothing, range[0], range[1], props.marks, time]);

  const step = (event: KeyboardEvent) => {
    const chart = plot.current;
    if (!chart) return;
    const xs = chart.data[0]!;
    const from = chart.cursor.idx ?? xs.length - 1;
    const change = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (change) {
      const next = Math.max(0, Math.min(xs.length - 1, from + change));
      chart.setCursor({ left: chart.valToPos(xs[next]!, "x"), top: 8 }, true);
      props.onCursor?.(xs[next]!);
    } else if (event.key === "Enter" && chart.cursor.idx != null) props.onPick?.(xs[chart.cursor.idx]!);
    else if (event.key === "Escape") props.onZoom(null);
    else return;
    event.preventDefault();
  };

  return (
    <section class="chart" aria-label={props.title} tabIndex={0} onKeyDown={step}>
      <header title={props.name}>
        <h3>{props.title}</h3>
        <span class="name cut hide-narrow">{props.name}</span>
        <span class="now" ref={now} />
      </header>
      {empty ? <div class="blank">not recorded</div> : <div ref={box} />}
    </section>
  );
}

function chooseHeight(width: number): number {
  return Math.round(Math.max(168, Math.min(264, width * 0.45)));
}

function drawLine(line: Line, smoothed: boolean): uPlot.Series[] {
  const main: uPlot.Series = {
    stroke: line.color,
    width: 1.5,
    spanGaps: true,
    points: { show: line.xs.length < 3, size: 5 },
  };
  const raw: uPlot.Series = { ...main, width: 1, alpha: 0.25 };
  return smoothed ? [raw, main] : [main];
}

function lastNumber(values: Value[]): Value {
  for (let place = values.length - 1; place >= 0; place--) if (values[place] != null) return values[place]!;
  return null;
}

function pad(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (low === 0 && high === 0) return [-0.05, 1];
  const room = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** A line of the last rewards, without axes. */
export function Spark({ values }: { values: Value[] }) {
  const known = values.flatMap((value, place) => (value === null ? [] : [[place, value] as const]));
  if (known.length < 2) return <svg class="spark" aria-hidden="true" />;
  const low = Math.min(...known.map(([, value]) => value));
  const high = Math.max(...known.map(([, value]) => value));
  const at = ([place, value]: readonly [number, number]) => [
    ((place / (values.length - 1)) * 92 + 2).toFixed(1),
    (high > low ? 17 - ((value - low) / (high - low)) * 14 : 10).toFixed(1),
  ];
  const [x, y] = at(known[known.length - 1]!);
  return (
    <svg
      class="spark"
      viewBox="0 0 96 20"
      role="img"
      aria-label={`from ${formatNumber(known[0]![1])} to ${formatNumber(known[known.length - 1]![1])}`}
    >
      <path d={`M${known.map((point) => at(point).join(" ")).join("L")}`} />
      <circle cx={x} cy={y} r="2" />
    </svg>
  );
}

interface HistogramProps {
  label: string;
  counts: Counts | null;
  low: number | null;
  high: number | null;
  onBrush: (low: number | null, high: number | null) => void;
}

/** Counts of a column. Dragging over it sets the filter, a click removes it. */
export function Histogram({ label, counts, low, high, onBrush }: HistogramProps) {
  const box = useRef<SVGSVGElement>(null);
  const start = useRef<number | null>(null);
  const brush = useRef<SVGRectElement>(null);
  const edges = counts?.edges ?? [];
  const bins = counts?.counts.length ?? 0;
  const first = edges[0] ?? 0;
  const width = (edges[bins] ?? 1) - first || 1;
  const most = Math.max(1, ...(counts?.counts ?? []));
  const share = (event: PointerEvent) => {
    const bounds = box.current!.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - bounds.left) / bounds.width));
  };
  const drag = (event: PointerEvent) => {
    if (start.current === null) return;
    const at = share(event);
    brush.current!.setAttribute("x", String(Math.min(at, start.current) * 200));
    brush.current!.setAttribute("width", String(Math.abs(at - start.current) * 200));
  };
  const release = (event: PointerEvent) => {
    if (start.current === null) return;
    const [from, to] = [start.current, share(event)].sort((a, b) => a - b) as [number, number];
    start.current = null;
    brush.current!.setAttribute("width", "0");
    if (to - from < 0.01 || bins === 0) onBrush(null, null);
    else onBrush(edges[Math.floor(from * bins)] ?? null, edges[Math.min(bins, Math.ceil(to * bins))] ?? null);
  };
  return (
    <svg
      ref={box}
      class="histogram"
      viewBox="0 0 200 56"
      preserveAspectRatio="none"
      role="img"
      aria-label={label}
      onPointerDown={(event) => {
        start.current = share(event);
        box.current!.setPointerCapture(event.pointerId);
      }}
      onPointerMove={drag}
      onPointerUp={release}
    >
      {(counts?.counts ?? []).map((count, place) => {
        const from = edges[place]!;
        const to = edges[place + 1]!;
        const inside = (low === null || to > low) && (high === null || from <= high);
        const tall = count === 0 ? 0 : Math.max(1.5, (count / most) * 54);
        return (
          <rect
            key={place}
            class={inside ? "count in" : "count"}
            x={((from - first) / width) * 200}
            y={55 - tall}
            width={Math.max(0.5, 200 / bins - 0.8)}
            height={tall}
          />
        );
      })}
      <line x1="0" x2="200" y1="55.5" y2="55.5" vector-effect="non-scaling-stroke" />
      <rect ref={brush} class="brush" x="0" y="0" width="0" height="56" />
    </svg>
  );
}
