// The table of runs: state, what differs, numbers; two to eight of them can be compared.
import { useState } from "preact/hooks";
import { useApi, type Run } from "../api";
import { Spark } from "../charts";
import { formatAge, formatCount, formatFixed, formatSeconds, formatTime, formatValue } from "../format";
import { useKeys } from "../keys";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { State } from "../signs";
import { Table, type Column } from "../table";
import { Empty, Failure, Line } from "../text";
import { useWidth } from "../width";

const MOST = 8;
const PLAIN_WIDTH = 1130;
const FIELD_WIDTH = 96;

const SORTS: Record<string, (run: Run) => string | number | null> = {
  name: (run) => run.name,
  state: (run) => run.state,
  step: (run) => run.step,
  reward: (run) => run.reward,
  held_out: (run) => run.held_out,
  duration: (run) => run.duration_s,
  updated: (run) => run.updated,
  samples: (run) => run.samples,
};

function sortRuns(runs: Run[], name: string, descending: boolean): Run[] {
  const value = SORTS[name] ?? SORTS["updated"]!;
  const sign = descending ? -1 : 1;
  return [...runs].sort((a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === right) return a.name.localeCompare(b.name);
    if (left === null) return 1;
    if (right === null) return -1;
    return left < right ? -sign : sign;
  });
}

/** The end of a path; any other value as it is. */
function shorten(value: string): string {
  return value.startsWith("/") ? value.split("/").filter(Boolean).slice(-1).join("/") : value;
}

export function RunsView() {
  const { query } = useRoute();
  const width = useWidth();
  const { data, error } = useApi<{ runs: Run[] }>("/api/runs", "*");
  const [chosen, setChosen] = useState<string[]>([]);
  const search = query.get("search") ?? "";
  const sort = { name: query.get("sort") ?? "updated", descending: query.get("descending") !== "0" };
  const compare = () => chosen.length >= 2 && navigate(`/compare?runs=${chosen.map(encodeURIComponent).join(",")}`);
  useKeys({ v: ["Compare the chosen runs", compare] });
  if (error && !data)
    return (
      <main class="view">
        <Failure text={error} />
      </main>
    );
  if (!data) return <main class="view" aria-busy="true" />;
  const matching = data.runs.filter((run) =>
    `${run.name} ${run.recipe} ${run.base_model}`.toLowerCase().includes(search.toLowerCase()),
  );
  const runs = sortRuns(matching, sort.name, sort.descending);
  const differing = [...new Set(data.runs.flatMap((run) => Object.keys(run.differs)))];
  const fields = differing.slice(0, Math.max(0, Math.min(6, Math.floor((width - PLAIN_WIDTH) / FIELD_WIDTH))));
  const left = differing.slice(fields.length);
  const toggle = (run: Run) =>
    setChosen((last) =>
      last.includes(run.key) ? last.filter((id) => id !== run.key) : [...last, run.key].slice(-MOST),
    );
  const columns: Column<Run>[] = [
    {
      name: "chosen",
      title: "",
      width: "16px",
      render: (run) => (
        <input
          type="checkbox"
          aria-label={`Choose ${run.name}`}
          checked={chosen.includes(run.key)}
          onClick={(event) => event.stopPropagation()}
          onChange={() => toggle(run)}
        />
      ),
    },
    {
      name: "name",
      title: "Run",
      width: "minmax(180px, 2fr)",
      sortable: true,
      render: (run) => (
        <a href={linkTo(run.key, "curves")} title={run.path}>
          <Line text={run.name} />
        </a>
      ),
    },
    {
      name: "state",
      title: "State",
      width: "84px",
      sortable: true,
      render: (run) => <State state={run.state} text={run.state_text} />,
    },
    ...fields.map((field): Column<Run> => ({
      name: field,
      title: field,
      hint: field,
      width: "minmax(80px, 1fr)",
      render: (run) => (
        <span class="soft" title={`${field}: ${formatValue(run.differs[field])}`}>
          {field in run.differs ? <Line text={shorten(formatValue(run.differs[field]))} /> : ""}
        </span>
      ),
    })),
    {
      name: "step",
      title: "Step",
      width: "64px",
      number: true,
      sortable: true,
      render: (run) => formatCount(run.step),
    },
    {
      name: "rows",
      title: "Rows",
      width: "64px",
      number: true,
      render: (run) =>
        run.rows_total ? `${Math.round((100 * (run.rows_done ?? 0)) / run.rows_total)} %` : formatCount(run.rows_done),
    },
    { name: "spark", title: "Reward", width: "96px", render: (run) => <Spark values={run.spark} /> },
    {
      name: "reward",
      title: "Last",
      width: "64px",
      number: true,
      sortable: true,
      render: (run) => formatFixed(run.reward),
    },
    {
      name: "held_out",
      title: "Held-out",
      width: "80px",
      number: true,
      sortable: true,
      render: (run) => formatFixed(run.held_out),
    },
    {
      name: "samples",
      title: "Samples",
      width: "80px",
      number: true,
      sortable: true,
      render: (run) => (run.has_samples ? formatCount(run.samples) : <span class="faint">none</span>),
    },
    {
      name: "duration",
      title: "Duration",
      width: "80px",
      number: true,
      sortable: true,
      render: (run) => formatSeconds(run.duration_s),
    },
    {
      name: "updated",
      title: "Changed",
      width: "96px",
      number: true,
      sortable: true,
      render: (run) => (
        <span class="soft" title={formatTime(run.updated)}>
          {formatAge(run.updated)}
        </span>
      ),
    },
  ];
  return (
    <main class="view fixed">
      <div class="toolbar">
        <h2>Runs</h2>
        <span class="faint">{formatCount(runs.length)}</span>
        <input
          type="search"
          placeholder="Search runs"
          aria-label="Search runs"
          value={search}
          onInput={(event) => setQuery({ search: event.currentTarget.value })}
        />
        {left.length > 0 && (
          <span class="faint small" title={left.join("\n")}>
            {left.length} more {left.length === 1 ? "setting differs" : "settings differ"}
          </span>
        )}
        <span class="grow" />
        <span class="faint small">
          {chosen.length === 0 ? "Choose two to eight runs to compare them" : `${chosen.length} chosen`}
        </span>
        <button class="primary" disabled={chosen.length < 2} onClick={compare}>
          Compare
        </button>
      </div>
      {runs.length === 0 ? (
        <Empty title={data.runs.length ? "No run matches" : "No runs here yet"}>
          {data.runs.length ? (
            "Search for another part of a name, recipe or model."
          ) : (
            <>
              Train one with <code>hearth quickstart</code>, then open its folder: <code>hearth view runs</code>.
            </>
          )}
        </Empty>
      ) : (
        <Table
          label="Runs"
          columns={columns}
          total={runs.length}
          row={(place) => runs[place] ?? null}
          sort={sort}
          onSort={({ name, descending }) => setQuery({ sort: name, descending: descending ? "1" : "0" })}
          onOpen={(run) => navigate(linkTo(run.key, "curves"))}
          keys={{ x: ["Choose the run for comparison", toggle], " ": ["Choose the run for comparison", toggle] }}
        />
      )}
    </main>
  );
}
