// Two to eight runs: curves over one another, what differs in their settings, and where each parts from the first.
import { useEffect, useMemo, useState } from "preact/hooks";
import { fetchJson, runUrl, useApi, type Comparison, type Run, type RunDetail, type Series } from "../api";
import { seriesColor, useDark } from "../colors";
import { RUN_PAUSE_MS, onGrowth } from "../live";
import { AxisControls, letterOf, Plots, type Source } from "../plots";
import { linkTo, setQuery, useRoute } from "../router";
import { State } from "../signs";
import { Empty, Failure, Line } from "../text";
import { SettingsTable } from "./config";
import { chooseCharts } from "./curves";

export function CompareView() {
  const { query } = useRoute();
  const ids = (query.get("runs") ?? "").split(",").filter(Boolean).slice(0, 8);
  const search = query.get("search") ?? "";
  const { details, failure } = useDetails(ids);
  const metrics = useMemo(() => [...new Set(details.flatMap((run) => run.metrics))], [details]);
  const charts = useMemo(() => chooseCharts(metrics, search), [metrics, search]);
  const sources = useSources(details, charts.map(({ name }) => name).join(","));
  const comparison = useApi<Comparison>(
    ids.length > 1 ? `/api/compare?runs=${ids.map(encodeURIComponent).join(",")}` : null,
  );
  if (ids.length < 2)
    return (
      <main class="view">
        <Empty title="Choose two runs at least">
          Mark them in the <a href="/runs">table of runs</a> (key <kbd>x</kbd>), then compare (key <kbd>v</kbd>).
        </Empty>
      </main>
    );
  return (
    <main class="view">
      <div class="page">
        {failure && <Failure text={failure} />}
        <RunLegend runs={details} />
        {comparison.error && <Failure text={comparison.error} />}
        {comparison.data && <Parting comparison={comparison.data} runs={details} />}
        <div class="bar wrap">
          <input
            type="search"
            placeholder={`Search ${metrics.length} metrics`}
            aria-label="Search metrics"
            value={search}
            onInput={(event) => setQuery({ search: event.currentTarget.value })}
          />
          <AxisControls />
        </div>
        {sources.length > 0 && <Plots sources={sources} charts={charts} />}
        {comparison.data && <Differences comparison={comparison.data} runs={details} />}
      </div>
    </main>
  );
}

function useDetails(ids: string[]): { details: RunDetail[]; failure: string | null } {
  const [details, setDetails] = useState<RunDetail[]>([]);
  const [failure, setFailure] = useState<string | null>(null);
  useEffect(() => {
    Promise.all(ids.map((id) => fetchJson<RunDetail>(runUrl(id)))).then(setDetails, (error: Error) =>
      setFailure(error.message),
    );
  }, [ids.join()]);
  return { details, failure };
}

function useSources(runs: Run[], names: string): Source[] {
  const [sources, setSources] = useState<Source[]>([]);
  useEffect(() => {
    let current = true;
    const ask = async () => {
      const url = `/series?names=${encodeURIComponent(names)}`;
      const found = await Promise.all(
        runs.map(async (run) => ({
          label: run.name,
          series: await fetchJson<Series>(runUrl(run.key, url)),
          events: [],
        })),
      );
      if (current) setSources(found);
    };
    if (runs.length > 0) void ask().catch(() => {});
    const stops = runs.map((run) => onGrowth(run.key, () => void ask().catch(() => {}), RUN_PAUSE_MS));
    return () => {
      current = false;
      for (const stop of stops) stop();
    };
  }, [runs, names]);
  return sources;
}

/** The color and letter of the n-th run, as the charts draw it. */
export function LineSign({ place }: { place: number }) {
  const dark = useDark();
  const color = seriesColor(place, dark);
  return (
    <span class="line-sign" style={{ color }}>
      <svg viewBox="0 0 22 12" aria-hidden="true">
        <line x1="1" x2="21" y1="6" y2="6" stroke="currentColor" stroke-width="2.5" />
      </svg>
      {letterOf(place)}
    </span>
  );
}

function RunLegend({ runs }: { runs: Run[] }) {
  return (
    <div class="legend">
      {runs.map((run, place) => (
        <span key={run.key}>
          <LineSign place={place} />
          <a class="cut" href={linkTo(run.key, "curves")}>
            <Line text={run.name} />
          </a>
          <State state={run.state} />
        </span>
      ))}
    </div>
  );
}

function Parting({ comparison, runs }: { comparison: Comparison; runs: Run[] }) {
  const first = runs[0];
  if (!first) return null;
  return (
    <section class="panel">
      <div class="bar">
        <h2>Where they part</h2>
        <span class="faint">
          from <Line text={first.name} />
        </span>
      </div>
      <div class="page">
        {comparison.parts.map((parts, place) => (
          <div key={place} class="parting">
            <div class="legend">
              <span>
                <LineSign place={place + 1} />
                <Line text={runs[place + 1]?.name ?? parts.run} />
                <strong>
                  {describePlace(parts)}
                </strong>
              </span>
            </div>
            <p>
              <Line text={parts.reason} />
            </p>
            {parts.sample && (
              <p class="bar wrap">
                {[0, place + 1].map((number) => {
                  const run = runs[number];
                  if (run?.key === parts.missing_in) return null;
                  const token = parts.token === null ? "" : `&token=${parts.token}`;
                  return (
                    run && (
                      <a
                        key={number}
                        class="button"
                        href={`${linkTo(run.key, "sample", parts.sample!)}?view=tokens${token}`}
                      >
                        The sample in <Line text={run.name} />
                      </a>
                    )
                  );
                })}
              </p>
            )}
          </div>
        ))}
      </div>
    </section>
  );
}

function describePlace({ step, sample, token }: Comparison["parts"][number]): string {
  if (step === null) return "does not part";
  const sampled = sample?.split(".")[1];
  const samples = sampled === undefined || sampled === String(step) ? "" : `; its samples at step ${sampled}`;
  return `parts at step ${step}${samples}${token === null ? "" : `, token ${token}`}`;
}

function Differences({ comparison, runs }: { comparison: Comparison; runs: Run[] }) {
  return (
    <section class="panel">
      <div class="bar">
        <h2>Settings that differ</h2>
        <span class="faint">{comparison.config.length}</span>
      </div>
      {comparison.config.length === 0 ? (
        <div class="page soft">All settings are equal.</div>
      ) : (
        <SettingsTable
          heads={["Setting", ...runs.map((run, place) => <RunHead run={run} place={place} />)]}
          rows={comparison.config.map(({ field, values }) => [field, ...values])}
        />
      )}
    </section>
  );
}

function RunHead({ run, place }: { run: Run; place: number }) {
  return (
    <span class="legend">
      <span>
        <LineSign place={place} />
        <Line text={run.name} />
      </span>
    </span>
  );
}
