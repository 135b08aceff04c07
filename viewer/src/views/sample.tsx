// One sample: its conversation as the template drew it, its exact tokens, and what is known of it.
import { Fragment } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { runUrl, useApi, type Part, type RunDetail, type Sample } from "../api";
import { formatCount, formatFixed, formatSeconds, formatSigned, formatTime, formatValue } from "../format";
import { useKeys } from "../keys";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { colorNames } from "../scales";
import { Outcome } from "../signs";
import { copyText, Empty, Line, Pending, Text } from "../text";
import { TokenCard, TokenView } from "../tokens";
import { AskAgain } from "./again";
import { groupOf } from "./samples";

const VIEWS = [
  ["conversation", "Conversation"],
  ["tokens", "Tokens"],
  ["again", "Ask again"],
] as const;
const FOLD_CHARACTERS = 2_400;
const FOLD_LINES = 30;

export function SampleView({ run, id }: { run: RunDetail; id: string }) {
  const { query } = useRoute();
  const { data, error, pending } = useApi<Sample>(runUrl(run.key, `/samples/${encodeURIComponent(id)}`));
  const view = query.get("view") ?? (query.has("color") ? "tokens" : "conversation");
  const sample = pending && data?.id !== id ? null : data;
  const step = (neighbor: string | null | undefined) => () => {
    if (!neighbor) return;
    const kept = new URLSearchParams();
    for (const name of ["view", "color"]) if (query.get(name)) kept.set(name, query.get(name)!);
    navigate(linkTo(run.key, "sample", neighbor) + (kept.size ? `?${kept}` : ""));
  };
  const [next, previous] = [step(data?.neighbors.next), step(data?.neighbors.previous)];
  const show = (name: string) => setQuery({ view: name === "conversation" && !query.has("color") ? null : name });
  const group = data ? linkTo(run.key, "group", groupOf(data)) : "";
  useKeys({
    j: ["Next answer of the group", next],
    k: ["Answer before", previous],
    v: ["Conversation or tokens", () => show(view === "tokens" ? "conversation" : "tokens")],
    a: ["Ask again", () => show("again")],
    g: ["Open the group", () => data && navigate(group)],
    p: ["This prompt through time", () => data && navigate(linkTo(run.key, "prompt", `${data.kind}.${data.row}`))],
    y: ["Copy the text", () => data && void copyText(data.text, "Text")],
    i: ["Copy the token ids", () => data && void copyText(data.tokens.ids.join(" "), "Token ids")],
    Escape: ["Back", () => history.back()],
  });
  if (!data) return <Pending error={error} />;
  return (
    <main class="view fixed" aria-busy={pending}>
      <div class="toolbar">
        <div class="segments" role="group" aria-label="View">
          {VIEWS.map(([name, title]) => (
            <button key={name} aria-pressed={view === name} onClick={() => show(name)}>
              {title}
            </button>
          ))}
        </div>
        <button class="quiet" disabled={!data.neighbors.previous} onClick={previous} title="Answer before (k)">
          Before
        </button>
        <button class="quiet" disabled={!data.neighbors.next} onClick={next} title="Next answer (j)">
          Next
        </button>
        <a class="button quiet" href={group}>
          Group
        </a>
        <a class="button quiet" href={linkTo(run.key, "prompt", `${data.kind}.${data.row}`)}>
          Through time
        </a>
        <span class="grow" />
        <button class="quiet" onClick={() => void copyText(data.text, "Text")}>
          Copy text
        </button>
        <button class="quiet" onClick={() => void copyText(data.tokens.ids.join(" "), "Token ids")}>
          Copy ids
        </button>
        <a class="button" href={runUrl(run.key, `/report?what=sample&id=${encodeURIComponent(data.id)}`)} download>
          Report
        </a>
      </div>
      {sample && <Body key={sample.id} run={run} sample={sample} view={view} query={query} />}
    </main>
  );
}

function Body({ run, sample, view, query }: { run: RunDetail; sample: Sample; view: string; query: URLSearchParams }) {
  const names = useMemo(() => colorNames(sample), [sample]);
  const asked = query.get("color");
  const color = asked === "none" || (asked && names.includes(asked)) ? asked : (names[0] ?? "none");
  const given = Number(query.get("token") ?? NaN);
  const [cursor, setCursor] = useState(
    Number.isInteger(given) ? given : Math.min(sample.prompt_len, sample.tokens.ids.length - 1),
  );
  const [hover, setHover] = useState<number | null>(null);
  useEffect(() => {
    if (Number.isInteger(given)) setCursor(given);
  }, [given]);
  const move = (token: number) => {
    setCursor(token);
    setQuery({ token });
  };
  return (
    <div class="split" style={{ gridTemplateColumns: "minmax(0, 1fr) 328px" }}>
      {view === "tokens" && (
        <TokenView sample={sample} color={color} cursor={cursor} onCursor={move} onHover={setHover} />
      )}
      {view === "again" && <AskAgain run={run} sample={sample} />}
      {view === "conversation" && <Conversation sample={sample} />}
      <aside class="side" aria-label="About the sample">
        {view === "tokens" && <TokenCard sample={sample} token={hover ?? cursor} />}
        <Facts sample={sample} />
      </aside>
    </div>
  );
}

function Conversation({ sample }: { sample: Sample }) {
  const specials = useMemo(
    () => [...new Set(sample.tokens.special.flatMap((token) => sample.tokens.texts[token] || []))],
    [sample],
  );
  if (sample.parts.length === 0) {
    return <Empty title="Nothing was sampled">{sample.reason && <Line text={sample.reason} />}</Empty>;
  }
  return (
    <div class="view" tabIndex={0} aria-label="Conversation">
      <div class="conversation">
        {sample.parts.map((part) => (
          <PartBox key={part.start} part={part} specials={specials} />
        ))}
      </div>
    </div>
  );
}

/** A part of the conversation; long ones and tool calls are folded. */
function PartBox({ part, specials }: { part: Part; specials: string[] }) {
  const lines = part.text.split("\n", FOLD_LINES + 1).length;
  const long = part.text.length > FOLD_CHARACTERS || lines > FOLD_LINES;
  const [open, setOpen] = useState(!long && !part.tool_call);
  const text = open ? part.text : foldText(part);
  return (
    <article class={part.sampled ? "part sampled" : "part"}>
      <header>
        <Line text={part.role || "text"} />
        <small>
          {part.sampled ? "sampled" : "given"}, {formatCount(part.end - part.start)}
        </small>
      </header>
      <div class="body">
        {text !== "" && <Text text={text} specials={specials} />}
        {(long || part.tool_call) && (
          <button class="fold" aria-expanded={open} onClick={() => setOpen(!open)}>
            {open
              ? "Fold"
              : part.tool_call
                ? "Show the tool call"
                : `Show all ${formatCount(part.text.length)} characters`}
          </button>
        )}
      </div>
    </article>
  );
}

function foldText(part: Part): string {
  if (part.tool_call) return part.text.replace(/\s+/g, " ").slice(0, 120);
  return part.text
    .split("\n", FOLD_LINES)
    .join("\n")
    .slice(0, FOLD_CHARACTERS / 2);
}

function Facts({ sample }: { sample: Sample }) {
  const versions = [
    ...new Set(
      (sample.values["version"] ?? []).filter(
        (version): version is number => typeof version === "number" && version >= 0,
      ),
    ),
  ];
  const facts: [string, string | null][] = [
    ["step", formatCount(sample.step)],
    ["row", `${sample.row} (epoch ${sample.epoch})`],
    ["group", `${sample.index}, answer ${sample.completion}`],
    ["part", sample.segment > 0 ? String(sample.segment) : null],
    ["seed", sample.seeds.join(", ")],
    ["versions", versions.join(", ") || null],
    ["finish", sample.finish_reason],
    ["tokens", `${formatCount(sample.prompt_len)} + ${formatCount(sample.length)}`],
    ["turns", sample.turns > 1 ? String(sample.turns) : null],
    ["tool calls", sample.tool_calls > 0 ? String(sample.tool_calls) : null],
    ["mean logprob", formatFixed(sample.mean_logprob, 4)],
    ["started", formatTime(sample.started)],
    ["sampling", formatSeconds(sample.sample_s)],
    ["reward took", formatSeconds(sample.score_s)],
  ];
  const parts = Object.entries(sample.reward_parts ?? {});
  const settings = Object.entries(sample.settings ?? {});
  return (
    <>
      <section>
        <h3>Reward</h3>
        <dl class="facts">
          <dt>reward</dt>
          <dd>
            <strong>{formatFixed(sample.reward, 4)}</strong>
          </dd>
          {parts.map(([name, value]) => (
            <Fact key={name} name={name} value={formatFixed(value, 4)} />
          ))}
          <dt>advantage</dt>
          <dd>{formatSigned(sample.advantage, 4)}</dd>
          <dt>outcome</dt>
          <dd>
            <Outcome outcome={sample.outcome} />
          </dd>
          {sample.reason && <Fact name="reason" value={sample.reason} />}
          {sample.parsed !== null && <Fact name="answer found" value={sample.parsed ? "yes" : "no"} />}
          {sample.ground_truth !== null && <Fact name="truth" value={sample.ground_truth.slice(0, 2000)} />}
        </dl>
      </section>
      <section>
        <h3>Sample</h3>
        <dl class="facts">{facts.map(([name, value]) => value && <Fact key={name} name={name} value={value} />)}</dl>
      </section>
      {settings.length > 0 && (
        <section>
          <h3>Sampling</h3>
          <dl class="facts">
            {settings.map(([name, value]) => (
              <Fact key={name} name={name} value={formatValue(value)} />
            ))}
          </dl>
        </section>
      )}
      {sample.metadata !== null && (
        <section>
          <h3>Metadata</h3>
          <Text text={formatMetadata(sample.metadata)} limit={4000} />
        </section>
      )}
    </>
  );
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <>
      <dt>
        {name.split(/(?<=_)/).map((word, place) => (
          <Fragment key={place}>
            <Line text={word} />
            <wbr />
          </Fragment>
        ))}
      </dt>
      <dd>
        <Line text={value} />
      </dd>
    </>
  );
}

function formatMetadata(metadata: unknown): string {
  try {
    return JSON.stringify(typeof metadata === "string" ? JSON.parse(metadata) : metadata, null, 1);
  } catch {
    return String(metadata);
  }
}
