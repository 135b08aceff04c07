// A run's page: what it is, how far it came, its twelve curves and any other by search.
import { useMemo } from "preact/hooks";
import { fetchJson, runUrl, useApi, type RunDetail, type RunEvent, type Series } from "../api";
import { formatCount, formatFixed, formatSeconds, formatTime } from "../format";
import { RUN_PAUSE_MS, useLastStep } from "../live";
import { chooseLeading, chooseName } from "../metrics";
import { AxisControls, EventControls, Plots } from "../plots";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { Empty, Failure, Line } from "../text";

const MOST = 36;

export function CurvesView({ run }: { run: RunDetail }) {
  const { query } = useRoute();
  const search = query.get("search") ?? "";
  const charts = useMemo(() => chooseCharts(run.metrics, search), [run.metrics.join(), search]);
  const names = charts.map(({ name }) => name).join(",");
  const url = runUrl(run.key, `/series?names=${encodeURIComponent(names)}`);
  // Both at once, so that the charts are drawn once.
  const { data, error } = useApi<[Series, { events: RunEvent[] }]>(
    url,
    run.key,
    (url, init) =>
      Promise.all([fetchJson<Series>(url, init), fetchJson<{ events: RunEvent[] }>(runUrl(run.key, "/events"), init)]),
    RUN_PAUSE_MS,
  );
  const [series, events] = [data?.[0], data?.[1].events ?? []];
  const sources = useMemo(() => (series ? [{ label: run.name, series, events }] : []), [data]);
  const openStep = run.has_samples
    ? (step: number) => navigate(linkTo(run.key, "samples") + `?step_min=${step}&step_max=${step}`)
    : undefined;
  return (
    <main class="view">
      <div class="page">
        {run.state === "failed" && run.state_text && <Failure text={run.state_text} />}
        <Stats run={run} />
        <div class="bar wrap">
          <input
            type="search"
            placeholder={`Search ${run.metrics.length} metrics`}
            aria-label="Search metrics"
            value={search}
            onInput={(event) => setQuery({ search: event.currentTarget.value })}
          />
          <AxisControls />
          <span class="grow" />
          <EventControls events={events} />
        </div>
        {error && !series && <Failure text={error} />}
        {series && series.steps.length === 0 && series.eval.steps.length === 0 ? (
          <Empty title="No step has ended yet">
            Curves begin with the first line of <code>metrics.jsonl</code>. This page shows it by itself.
          </Empty>
        ) : charts.length === 0 ? (
          <Empty title="No metric matches">
            Search for a part of a name, such as <code>perf/</code> or <code>reward</code>.
          </Empty>
        ) : (
          sources.length > 0 && <Plots sources={sources} charts={charts} onPick={openStep} />
        )}
      </div>
    </main>
  );
}

/** The charts of a search: the twelve leading ones where nothing is searched. */
export function chooseCharts(metrics: string[], search: string): { title: string; name: string }[] {
  if (!search) {
    const known = new Set(metrics);
    return chooseLeading(known).map((leading) => ({ title: leading.title, name: chooseName(leading, known) }));
  }
  const words = search.toLowerCase().split(/\s+/);
  return metrics
    .filter((name) => words.every((word) => name.toLowerCase().includes(word)))
    .slice(0, MOST)
    .map((name) => ({ title: name, name }));
}

function Stats({ run }: { run: RunDetail }) {
  const first = run.spark.find((value) => value !== null) ?? null;
  const title = run.reward === null && run.loss !== null ? "Loss" : "Reward";
  const step = useLastStep(run.key, run.step);
  const evaluations = run.evaluations.filter(({ accuracy, reward, loss }) => accuracy !== null || reward !== null || loss !== null);
  const heldOut = (place: number) => {
    const found = evaluations[place];
    return found?.accuracy ?? found?.reward ?? found?.loss ?? null;
  };
  return (
    <dl class="stats">
      <Stat title={title} value={formatFixed(run.reward ?? run.loss)} note={first !== null ? `from ${formatFixed(first)}` : ""} />
      <Stat
        title="Held-out"
        value={formatFixed(run.held_out ?? heldOut(evaluations.length - 1))}
        note={evaluations.length > 1 ? `from ${formatFixed(heldOut(0))}` : ""}
      />
      <Stat title="Step" value={formatCount(step)} />
      <Stat
        title="Rows"
        value={formatCount(run.rows_done)}
        note={run.rows_total ? `of ${formatCount(run.rows_total)}` : ""}
      />
      <Stat title="Samples" value={run.has_samples ? formatCount(run.samples) : "none"} />
      <Stat
        title="Duration"
        value={formatSeconds(run.duration_s)}
        note={run.resumes ? `${run.resumes} ${run.resumes === 1 ? "resume" : "resumes"}` : ""}
      />
      <Stat title="Model" value={baseName(run.base_model)} hint={run.base_model} />
      <Stat
        title="Recipe"
        value={run.recipe ?? "–"}
        note={run.policy_loss ?? ""}
        hint={`started ${formatTime(run.started)}`}
      />
    </dl>
  );
}

function Stat({ title, value, note, hint }: { title: string; value: string; note?: string; hint?: string | null }) {
  return (
    <div title={hint ?? undefined}>
      <dt>{title}</dt>
      <dd class={/^[\d–]/.test(value) ? "cut" : "cut words"}>
        <Line text={value} /> {note && <small>{note}</small>}
      </dd>
    </div>
  );
}

function baseName(path: string | null): string {
  return path?.split("/").filter(Boolean).slice(-2).join("/") ?? "–";
}
