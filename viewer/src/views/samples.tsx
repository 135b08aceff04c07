// All samples of a run: filters, search, order, and the way to a sample, its group and its prompt.
import { runUrl, type RunDetail, type SampleRow } from "../api";
import { clearFilters, countFilters, filterQuery, Filters, NUMBERS, SearchField } from "../filters";
import { DASH, formatCount, formatFixed, formatNumber, formatSigned, formatTime } from "../format";
import { useKeys } from "../keys";
import { usePages } from "../pages";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { Outcome } from "../signs";
import { useWidth } from "../width";
import { Table, type Column } from "../table";
import { Empty, Failure, Line } from "../text";

const UNUSED = new Set(["uniform", "filtered", "failed", "truncated", "stale", "dropped"]);

/** The name of a sample's group in URLs. */
export function groupOf(row: Pick<SampleRow, "kind" | "index" | "step">): string {
  return row.kind === "train" ? `${row.kind}.${row.index}` : `${row.kind}.${row.index}.${row.step}`;
}

export function SamplesView({ run }: { run: RunDetail }) {
  const { query } = useRoute();
  const width = useWidth();
  const room = [1100, 1300, 1700].filter((least) => width >= least).length;
  const filters = filterQuery(query);
  const sort = { name: query.get("sort") ?? "step", descending: query.get("descending") !== "0" };
  const pages = usePages<SampleRow>(
    runUrl(run.key, `/samples?${filters}&sort=${sort.name}&descending=${Number(sort.descending)}`),
    run.key,
  );
  const count = countFilters(query);
  useKeys({ r: ["Remove all filters", clearFilters] });
  if (!run.has_samples) {
    return (
      <main class="view">
        <Empty title="This run has no samples on record">
          Recipes record them by default. It ran with <code>record_samples="none"</code>, or with a version of Hearth
          from before; its curves and settings are all that there is.
        </Empty>
      </main>
    );
  }
  const rescored = query.get("rescored");
  const open = (row: SampleRow) => navigate(linkTo(run.key, "sample", row.id));
  return (
    <main class="view fixed">
      <div class="toolbar">
        <SearchField query={query} />
        {count > 0 && (
          <button class="quiet" onClick={clearFilters}>
            Remove {count} {count === 1 ? "filter" : "filters"}
          </button>
        )}
        <span class="grow" />
        <span class="faint small">
          {pages.total === null ? (pages.error ? "" : "Loading the samples") : `${formatCount(pages.total)} of ${formatCount(run.samples)}`}
          {pages.queryMs !== null && ` · ${Math.max(1, Math.round(pages.queryMs))} ms`}
        </span>
        <Exports run={run} filters={filters} />
      </div>
      {pages.error && <Failure text={pages.error} />}
      <div class="split" style={{ gridTemplateColumns: "232px minmax(0, 1fr)" }}>
        <Filters run={run} query={query} />
        {pages.total === 0 ? (
          <Empty title="No sample matches">
            Remove a filter, or search for something else.{" "}
            <button class="quiet" onClick={clearFilters}>
              Remove all filters
            </button>
          </Empty>
        ) : (
          <Table
            key={filters.toString() + sort.name + sort.descending}
            label="Samples"
            columns={makeColumns(run, rescored, room, sort.name)}
            total={pages.total ?? 0}
            row={pages.row}
            onSight={pages.onSight}
            sort={sort}
            onSort={({ name, descending }) => setQuery({ sort: name, descending: descending ? "1" : "0" })}
            onOpen={open}
            isMuted={(row) => UNUSED.has(row.outcome)}
            keys={{
              g: ["Open the row's group", (row) => navigate(linkTo(run.key, "group", groupOf(row)))],
              p: [
                "Open the row's prompt through time",
                (row) => navigate(linkTo(run.key, "prompt", `${row.kind}.${row.row}`)),
              ],
            }}
          />
        )}
      </div>
    </main>
  );
}

/** The columns that there is room for, and the one that the rows are ordered by. */
function makeColumns(run: RunDetail, rescored: string | null, room: number, sort: string): Column<SampleRow>[] {
  const columns = listColumns(run, rescored, room);
  const title = NUMBERS[sort];
  if (!title || columns.some(({ name }) => name === sort)) return columns;
  const ordering: Column<SampleRow> = {
    name: sort,
    title,
    width: sort === "started" ? "112px" : "88px",
    number: true,
    sortable: true,
    render: (row) => formatAny(row[sort as keyof SampleRow], sort),
  };
  const place = columns.findIndex(({ name }) => name === "prompt" || name === "text");
  return columns.toSpliced(place, 0, ordering);
}

function formatAny(value: unknown, name: string): string {
  if (typeof value !== "number") return DASH;
  return name === "started" ? formatTime(value).slice(5) : formatNumber(value);
}

function listColumns(run: RunDetail, rescored: string | null, room: number): Column<SampleRow>[] {
  const columns: (Column<SampleRow> | false)[] = [
    {
      name: "step",
      title: "Step",
      width: "56px",
      number: true,
      sortable: true,
      render: (row) => formatCount(row.step),
    },
    {
      name: "outcome",
      title: "Outcome",
      width: "92px",
      render: (row) => <Outcome outcome={row.outcome} reason={row.reason} />,
    },
    {
      name: "row",
      title: "Row",
      width: "52px",
      number: true,
      sortable: true,
      hint: "The line of the dataset; opens the prompt through time",
      render: (row) => <a href={linkTo(run.key, "prompt", `${row.kind}.${row.row}`)}>{row.row}</a>,
    },
    room > 0 && {
      name: "index",
      title: "Group",
      width: "56px",
      number: true,
      sortable: true,
      hint: "Opens all answers side by side",
      render: (row: SampleRow) => <a href={linkTo(run.key, "group", groupOf(row))}>{row.index}</a>,
    },
    {
      name: "reward",
      title: "Reward",
      width: "60px",
      number: true,
      sortable: true,
      render: (row) => formatFixed(row.reward),
    },
    !!rescored && {
      name: "rescored",
      title: "Rescored",
      width: "68px",
      number: true,
      sortable: true,
      render: (row: SampleRow) => formatFixed(row.rescored),
    },
    !!rescored && {
      name: "difference",
      title: "Change",
      width: "60px",
      number: true,
      render: (row: SampleRow) =>
        row.rescored == null || row.reward === null ? DASH : formatSigned(row.rescored - row.reward),
    },
    room > 0 && {
      name: "advantage",
      title: "Adv.",
      width: "60px",
      number: true,
      sortable: true,
      hint: "Advantage",
      render: (row: SampleRow) => formatSigned(row.advantage),
    },
    {
      name: "length",
      title: "Length",
      width: "56px",
      number: true,
      sortable: true,
      hint: "Sampled tokens",
      render: (row) => formatCount(row.length),
    },
    room > 0 && {
      name: "mean_logprob",
      title: "Logprob",
      width: "64px",
      number: true,
      sortable: true,
      hint: "Mean logprob of the sampled tokens",
      render: (row: SampleRow) => formatFixed(row.mean_logprob),
    },
    room > 2 && {
      name: "version",
      title: "Version",
      width: "60px",
      number: true,
      sortable: true,
      hint: "Weight version that sampled it",
      render: (row: SampleRow) => formatCount(row.version),
    },
    room > 2 && {
      name: "sample_s",
      title: "Seconds",
      width: "64px",
      number: true,
      sortable: true,
      hint: "Seconds of sampling",
      render: (row: SampleRow) => formatFixed(row.sample_s, 2),
    },
    room > (rescored ? 2 : 1) && {
      name: "prompt",
      title: "Prompt, its end",
      width: "minmax(200px, 1fr)",
      render: (row: SampleRow) => (
        <span class="faint">
          {row.match_in === "prompt" ? (
            <Line text={row.prompt_end} match={row.match} />
          ) : (
            <Line text={leaveOutMarkers(row.prompt_end)} />
          )}
        </span>
      ),
    },
    { name: "text", title: "Answer", width: "minmax(200px, 2fr)", render: (row) => <Answer row={row} /> },
  ];
  return columns.filter((column) => column !== false);
}

/** A prompt on one line without the template's markers, which take the room of what was asked. */
export function leaveOutMarkers(prompt: string): string {
  return prompt
    .replace(
      /(<\|[^|>\s]{1,32}\|>|<(start|end)_of_turn>|\[\/?INST\]|<\/?s>)((system|user|assistant|model|tool)\b)?\s*/g,
      " ",
    )
    .trim();
}

function Answer({ row }: { row: SampleRow }) {
  if (row.match_in === "prompt") return <Line text={row.text} />;
  return (
    <>
      {row.text_start > 0 && <span class="faint">… </span>}
      <Line text={row.text} match={row.match} />
      {row.reason && (
        <span class="reason" title={row.reason}>
          <Line text={row.reason} />
        </span>
      )}
    </>
  );
}

function Exports({ run, filters }: { run: RunDetail; filters: URLSearchParams }) {
  const url = (format: string) => runUrl(run.key, `/export?format=${format}&${filters}`);
  return (
    <details class="menu" onKeyDown={(event) => event.key === "Escape" && event.currentTarget.removeAttribute("open")}>
      <summary class="button">Export</summary>
      <div>
        <a href={url("csv")} download>
          What is filtered, as CSV
        </a>
        <a href={url("parquet")} download>
          What is filtered, as Parquet
        </a>
        <a href={runUrl(run.key, "/report?what=run")} download>
          Report of the run, as HTML
        </a>
      </div>
    </details>
  );
}
