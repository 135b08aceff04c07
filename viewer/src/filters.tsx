// The filters of samples: their names are those of the API and stand in the view's URL.
import { useEffect, useRef, useState } from "preact/hooks";
import { runUrl, useApi, type Histogram as Counts, type RunDetail } from "./api";
import { Histogram } from "./charts";
import { formatCount, formatNumber } from "./format";
import { setQuery, withChanges } from "./router";
import { Outcome, OUTCOME_NAMES } from "./signs";

const NAMES = [
  "kind",
  "outcome",
  "finish_reason",
  "step_min",
  "step_max",
  "reward_min",
  "reward_max",
  "length_min",
  "length_max",
  "row",
  "index",
  "epoch",
  "version",
  "parsed",
  "search",
  "regex",
  "in",
  "rescored",
];

/** All numbers of a sample, by which the table can be ordered. */
export const NUMBERS: Record<string, string> = {
  step: "Step",
  index: "Group",
  row: "Row",
  epoch: "Epoch",
  completion: "Answer",
  segment: "Part",
  reward: "Reward",
  advantage: "Advantage",
  length: "Length",
  prompt_len: "Prompt length",
  turns: "Turns",
  tool_calls: "Tool calls",
  mean_logprob: "Logprob",
  version: "Version",
  started: "Started",
  sample_s: "Sampling, s",
  score_s: "Scoring, s",
};

/** The part of a view's query that filters. */
export function filterQuery(query: URLSearchParams): URLSearchParams {
  const filters = new URLSearchParams();
  for (const name of NAMES) {
    const value = query.get(name);
    if (value) filters.set(name, value);
  }
  return filters;
}

/** How many filters are set. */
export function countFilters(query: URLSearchParams): number {
  return NAMES.filter((name) => name !== "in" && name !== "rescored" && query.get(name)).length;
}

/** Take all filters away. */
export function clearFilters(): void {
  setQuery(Object.fromEntries(NAMES.map((name) => [name, null])));
}

/** Text that is written into the query a moment after the last key. */
export function SearchField({ query }: { query: URLSearchParams }) {
  const asRegex = query.has("regex") || query.get("as") === "regex";
  const name = asRegex ? "regex" : "search";
  const kept = query.get("regex") ?? query.get("search") ?? "";
  const [text, setText] = useState(kept);
  const timer = useRef(0);
  const written = useRef(kept);
  useEffect(() => {
    if (kept !== written.current) setText(kept);
    written.current = kept;
  }, [kept]);
  const write = (value: string) => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      written.current = value;
      setQuery({ [name]: value });
    }, 120);
  };
  return (
    <>
      <input
        type="search"
        value={text}
        placeholder={asRegex ? "Regular expression" : "Search text"}
        aria-label="Search samples"
        onInput={(event) => write(event.currentTarget.value)}
      />
      <div class="segments" role="group" aria-label="How to search">
        <button aria-pressed={!asRegex} onClick={() => setQuery({ search: kept, regex: null, as: null })}>
          Text
        </button>
        <button
          aria-pressed={asRegex}
          title="Regular expression (RE2)"
          onClick={() => setQuery({ regex: kept, search: null, as: "regex" })}
        >
          Regex
        </button>
      </div>
      <select
        aria-label="Where to search"
        value={query.get("in") ?? "both"}
        onChange={(event) => setQuery({ in: event.currentTarget.value === "both" ? null : event.currentTarget.value })}
      >
        <option value="both">in answer and prompt</option>
        <option value="text">in the answer</option>
        <option value="prompt">in the prompt</option>
      </select>
    </>
  );
}

export function Filters({ run, query }: { run: RunDetail; query: URLSearchParams }) {
  const outcomes = new Set((query.get("outcome") ?? "").split(",").filter(Boolean));
  const toggle = (name: string) => {
    const next = new Set(outcomes);
    if (!next.delete(name)) next.add(name);
    setQuery({ outcome: [...next].join(",") });
  };
  return (
    <aside class="filters" aria-label="Filters">
      <NumberRange run={run} query={query} column="reward" title="Reward" />
      <NumberRange run={run} query={query} column="length" title="Length, tokens" />
      <section>
        <h3>Outcome</h3>
        <div class="list">
          {OUTCOME_NAMES.map((name) => (
            <label key={name} class="check">
              <input type="checkbox" checked={outcomes.has(name)} onChange={() => toggle(name)} />
              <Outcome outcome={name} />
            </label>
          ))}
        </div>
      </section>
      <section>
        <h3>Step</h3>
        <div class="pair">
          <NumberField query={query} name="step_min" title="from" />
          <NumberField query={query} name="step_max" title="to" />
        </div>
      </section>
      <section class="pair">
        <label class="field">
          Order by
          <select
            value={query.get("sort") ?? "step"}
            onChange={(event) => setQuery({ sort: event.currentTarget.value, descending: "1" })}
          >
            {Object.entries(NUMBERS).map(([name, title]) => (
              <option key={name} value={name}>
                {title}
              </option>
            ))}
            {query.has("rescored") && <option value="rescored">Rescored</option>}
          </select>
        </label>
        <label class="field">
          First
          <select
            value={query.get("descending") === "0" ? "0" : "1"}
            onChange={(event) => setQuery({ descending: event.currentTarget.value })}
          >
            <option value="1">largest</option>
            <option value="0">smallest</option>
          </select>
        </label>
        <Choice query={query} name="kind" title="Kind" values={["train", "eval"]} />
        <Choice query={query} name="finish_reason" title="Finish" values={["stop", "length", "tool_calls"]} />
        <Choice query={query} name="parsed" title="Parsed" values={["true", "false"]} />
        {run.rescored.length > 0 && <Choice query={query} name="rescored" title="Rescored by" values={run.rescored} />}
        <label class="field">
          Row
          <NumberField query={query} name="row" title="any" />
        </label>
        <label class="field">
          Epoch
          <NumberField query={query} name="epoch" title="any" />
        </label>
        <label class="field">
          Version
          <NumberField query={query} name="version" title="any" />
        </label>
        <label class="field">
          Group
          <NumberField query={query} name="index" title="any" />
        </label>
      </section>
    </aside>
  );
}

/** A histogram over what the other filters leave, whose brush and fields set this one. */
function NumberRange({
  run,
  query,
  column,
  title,
}: {
  run: RunDetail;
  query: URLSearchParams;
  column: string;
  title: string;
}) {
  const [low, high] = [`${column}_min`, `${column}_max`];
  const others = filterQuery(withChanges(query, { [low]: null, [high]: null }));
  const url = runUrl(run.key, `/histogram?column=${column}&bins=40&${others}`);
  const { data } = useApi<Counts>(run.has_samples ? url : null, run.key);
  const value = (name: string) => (query.get(name) ? Number(query.get(name)) : null);
  return (
    <section>
      <h3 class="bar">
        {title}
        <span class="grow" />
        {!!data?.missing && <span class="faint small">{formatCount(data.missing)} without</span>}
      </h3>
      <Histogram
        label={`Histogram of ${column}`}
        counts={data}
        low={value(low)}
        high={value(high)}
        onBrush={(from, to) =>
          setQuery({ [low]: from === null ? null : round(from), [high]: to === null ? null : round(to) })
        }
      />
      <div class="pair">
        <NumberField
          query={query}
          name={low}
          title={
            data?.edges.length ? formatNumber(column === "length" ? Math.ceil(data.edges[0]!) : data.edges[0]) : "from"
          }
        />
        <NumberField
          query={query}
          name={high}
          title={
            data?.edges.length
              ? formatNumber(
                  column === "length"
                    ? Math.floor(data.edges[data.edges.length - 1]!)
                    : data.edges[data.edges.length - 1],
                )
              : "to"
          }
        />
      </div>
    </section>
  );
}

function round(value: number): number {
  return Number(value.toPrecision(6));
}

function NumberField({ query, name, title }: { query: URLSearchParams; name: string; title: string }) {
  return (
    <input
      type="number"
      step="any"
      aria-label={`${name.replace("_", " ")}`}
      placeholder={title}
      value={query.get(name) ?? ""}
      onChange={(event) => setQuery({ [name]: event.currentTarget.value })}
    />
  );
}

function Choice({
  query,
  name,
  title,
  values,
}: {
  query: URLSearchParams;
  name: string;
  title: string;
  values: string[];
}) {
  return (
    <label class="field">
      {title}
      <select value={query.get(name) ?? ""} onChange={(event) => setQuery({ [name]: event.currentTarget.value })}>
        <option value="">any</option>
        {values.map((value) => (
          <option key={value} value={value}>
            {value}
          </option>
        ))}
      </select>
    </label>
  );
}
