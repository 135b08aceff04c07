// The settings of a run: what differs from the defaults first, then all of them.
import type { ComponentChildren } from "preact";
import type { RunDetail } from "../api";
import { formatBytes, formatCount, formatTime, formatValue } from "../format";
import { setQuery, useRoute } from "../router";
import { Empty, Line } from "../text";

/** Nested settings as dotted names. */
export function flatten(config: Record<string, unknown>, prefix = ""): [string, unknown][] {
  return Object.entries(config).flatMap(([name, value]): [string, unknown][] =>
    value && typeof value === "object" && !Array.isArray(value)
      ? flatten(value as Record<string, unknown>, `${prefix}${name}.`)
      : [[prefix + name, value]],
  );
}

export function ConfigView({ run }: { run: RunDetail }) {
  const { query } = useRoute();
  const search = query.get("search") ?? "";
  const matches = (name: string) => name.toLowerCase().includes(search.toLowerCase());
  const changed = Object.entries(run.changed).filter(([name]) => matches(name));
  const all = flatten(run.config).filter(([name]) => matches(name));
  return (
    <main class="view">
      <div class="page">
        <div class="bar wrap">
          <input
            type="search"
            placeholder="Search settings"
            aria-label="Search settings"
            value={search}
            onInput={(event) => setQuery({ search: event.currentTarget.value })}
          />
          <span class="grow" />
          <span class="faint small cut" title={run.path}>
            <Line text={run.path} /> · started {formatTime(run.started)}
            {run.recording &&
              ` · ${formatBytes(run.recording.bytes)} of samples in ${formatCount(run.recording.files)} files`}
          </span>
        </div>
        {run.recording?.text && (
          <p class="soft">
            <Line text={run.recording.text} />
          </p>
        )}
        {changed.length + all.length === 0 && (
          <Empty title={search ? "No setting matches" : "This run has no config.json"}>
            {search ? "Search for a part of a name." : "Recipes write it when they start."}
          </Empty>
        )}
        {changed.length > 0 && (
          <section class="panel changed">
            <div class="bar">
              <h2>Changed</h2>
              <span class="faint">{changed.length}</span>
            </div>
            <SettingsTable heads={["Setting", "Default", "This run"]} rows={changed.map(([name, values]) => [name, ...values])} />
          </section>
        )}
        {all.length > 0 && (
          <section class="panel">
            <div class="bar">
              <h2>All settings</h2>
              <span class="faint">{all.length}</span>
            </div>
            <SettingsTable rows={all} />
          </section>
        )}
      </div>
    </main>
  );
}

/** Settings by line: the name, then its values. */
export function SettingsTable({ heads, rows }: { heads?: ComponentChildren[]; rows: [string, ...unknown[]][] }) {
  return (
    <table class="plain">
      {heads && (
        <thead>
          <tr>
            {heads.map((head, place) => (
              <th key={place}>{head}</th>
            ))}
          </tr>
        </thead>
      )}
      <tbody>
        {rows.map(([name, ...values]) => (
          <tr key={name}>
            <td>
              <code>
                <Line text={name} />
              </code>
            </td>
            {values.map((value, place) => (
              <td key={place}>
                <Line text={formatValue(value)} />
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
