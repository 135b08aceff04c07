// All prompts of a run: how often each was answered, and how its reward went.
import { runUrl, type PromptRow, type RunDetail } from "../api";
import { formatCount, formatFixed } from "../format";
import { usePages } from "../pages";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { Table, type Column } from "../table";
import { Empty, Failure, Line } from "../text";
import { leaveOutMarkers } from "./samples";

const COLUMNS: Column<PromptRow>[] = [
  { name: "row", title: "Row", width: "64px", number: true, sortable: true, render: (row) => formatCount(row.row) },
  { name: "kind", title: "Kind", width: "48px", render: (row) => <span class="soft">{row.kind}</span> },
  {
    name: "times",
    title: "Answers",
    width: "72px",
    number: true,
    sortable: true,
    render: (row) => formatCount(row.times),
  },
  {
    name: "first_reward",
    title: "First",
    width: "64px",
    number: true,
    sortable: true,
    hint: "Mean reward the first time",
    render: (row) => formatFixed(row.first_reward),
  },
  {
    name: "last_reward",
    title: "Last",
    width: "64px",
    number: true,
    sortable: true,
    hint: "Mean reward the last time",
    render: (row) => formatFixed(row.last_reward),
  },
  { name: "best", title: "Best", width: "64px", number: true, sortable: true, render: (row) => formatFixed(row.best) },
  {
    name: "solved_share",
    title: "Solved",
    width: "128px",
    number: true,
    sortable: true,
    render: (row) => (
      <span>
        <span class="meter">
          <i style={{ width: `${100 * (row.solved_share ?? 0)}%` }} />
        </span>{" "}
        {row.solved_share === null ? "–" : `${Math.round(100 * row.solved_share)} %`}
      </span>
    ),
  },
  {
    name: "prompt_end",
    title: "Prompt, its end",
    width: "minmax(320px, 1fr)",
    render: (row) => <Line text={leaveOutMarkers(row.prompt_end)} />,
  },
];

export function PromptsView({ run }: { run: RunDetail }) {
  const { query } = useRoute();
  const search = query.get("search") ?? "";
  const sort = query.get("sort") ? { name: query.get("sort")!, descending: query.get("descending") === "1" } : null;
  const order = sort ? `&sort=${sort.name}&descending=${Number(sort.descending)}` : "";
  const pages = usePages<PromptRow>(runUrl(run.key, `/prompts?search=${encodeURIComponent(search)}${order}`), run.key);
  if (!run.has_samples)
    return (
      <main class="view">
        <Empty title="This run has no samples on record">
          Recipes record them by default; <code>record_samples="none"</code> switches it off.
        </Empty>
      </main>
    );
  return (
    <main class="view fixed">
      <div class="toolbar">
        <input
          type="search"
          placeholder="Search prompts"
          aria-label="Search prompts"
          value={search}
          onInput={(event) => setQuery({ search: event.currentTarget.value })}
        />
        <span class="grow" />
        <span class="faint small">{pages.total === null ? "" : `${formatCount(pages.total)} prompts`}</span>
      </div>
      {pages.error && <Failure text={pages.error} />}
      {pages.total === 0 ? (
        <Empty title="No prompt matches">Search for another part of it.</Empty>
      ) : (
        <Table
          key={search + order}
          label="Prompts"
          columns={COLUMNS}
          total={pages.total ?? 0}
          row={pages.row}
          onSight={pages.onSight}
          sort={sort}
          onSort={({ name, descending }) => setQuery({ sort: name, descending: descending ? "1" : "0" })}
          onOpen={(row) => navigate(linkTo(run.key, "prompt", `${row.kind}.${row.row}`))}
        />
      )}
    </main>
  );
}
