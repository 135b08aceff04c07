// A group side by side: all answers to one prompt, with what each was worth.
import { useEffect, useRef, useState } from "preact/hooks";
import { runUrl, useApi, type Group, type RunDetail, type SampleRow } from "../api";
import { formatCount, formatFixed, formatSigned } from "../format";
import { useKeys } from "../keys";
import { linkTo, navigate } from "../router";
import { Outcome } from "../signs";
import { Empty, Line, Pending, Text } from "../text";

const CUT = 6_000;

export function GroupView({ run, name }: { run: RunDetail; name: string }) {
  const { data, error } = useApi<Group>(runUrl(run.key, `/groups/${encodeURIComponent(name)}`));
  const [cursor, setCursor] = useState(0);
  const cards = useRef<HTMLDivElement>(null);
  const samples = data?.samples ?? [];
  const move = (change: number) => setCursor((last) => Math.max(0, Math.min(samples.length - 1, last + change)));
  const open = () => samples[cursor] && navigate(linkTo(run.key, "sample", samples[cursor].id));
  const [kind, index] = name.split(".");
  const neighbor = (change: number) => () =>
    Number(index) + change >= 0 &&
    kind === "train" &&
    navigate(linkTo(run.key, "group", `train.${Number(index) + change}`));
  useKeys({
    j: ["Next answer", () => move(1)],
    ArrowRight: ["Next answer", () => move(1)],
    k: ["Previous answer", () => move(-1)],
    ArrowLeft: ["Previous answer", () => move(-1)],
    Enter: ["Open the answer", open],
    n: ["Next group", neighbor(1)],
    b: ["Group before", neighbor(-1)],
    p: ["This prompt through time", () => data && navigate(linkTo(run.key, "prompt", `${kind}.${data.row}`))],
  });
  useEffect(() => cards.current?.children[cursor]?.scrollIntoView({ block: "nearest", inline: "nearest" }), [cursor]);
  if (!data) return <Pending error={error} />;
  return (
    <main class="view">
      <div class="toolbar">
        <h2>Group {index}</h2>
        <span class="soft">
          step {data.step} · row {data.row} · epoch {data.epoch}
        </span>
        <Outcome outcome={data.outcome} />
        <span class="soft">
          reward {formatFixed(data.mean)} ± {formatFixed(data.std)}
        </span>
        <span class="grow" />
        {kind === "train" && (
          <>
            <button class="quiet" disabled={Number(index) === 0} onClick={neighbor(-1)}>
              Group before
            </button>
            <button class="quiet" onClick={neighbor(1)}>
              Next group
            </button>
          </>
        )}
        <a class="button" href={linkTo(run.key, "prompt", `${kind}.${data.row}`)}>
          Through time
        </a>
        <a class="button" href={runUrl(run.key, `/report?what=group&id=${encodeURIComponent(name)}`)} download>
          Report
        </a>
      </div>
      <PromptBox prompt={data.prompt} truth={data.ground_truth} />
      {samples.length === 0 ? (
        <Empty title="No answer of this group is on record" />
      ) : (
        <div class="page">
          <div class="columns" ref={cards}>
            {samples.map((sample, place) => (
              <AnswerCard
                key={sample.id}
                run={run}
                sample={sample}
                current={place === cursor}
                onChoose={() => setCursor(place)}
              />
            ))}
          </div>
        </div>
      )}
    </main>
  );
}

/** The prompt and the truth, above the answers to it. */
export function PromptBox({ prompt, truth }: { prompt: string; truth: string | null }) {
  return (
    <section class="prompt" aria-label="Prompt" tabIndex={0}>
      <Text text={prompt} limit={CUT} />
      {truth !== null && (
        <div class="soft small">
          Truth: <Line text={truth.slice(0, 400)} />
        </div>
      )}
    </section>
  );
}

/** One answer among others. */
export function AnswerCard({
  run,
  sample,
  current,
  onChoose,
}: {
  run: RunDetail;
  sample: SampleRow;
  current?: boolean;
  onChoose?: () => void;
}) {
  return (
    <article class={current ? "card cursor" : "card"} aria-current={current} onClick={onChoose}>
      <header>
        <span class="score" title="Reward">
          {formatFixed(sample.reward)}
        </span>
        <span class="soft" title="Advantage">
          {sample.advantage === null ? "" : formatSigned(sample.advantage)}
        </span>
        <span class="grow" />
        <Outcome outcome={sample.outcome} reason={sample.reason} />
      </header>
      <div class="body" tabIndex={0}>
        <Text text={sample.text} limit={CUT} />
      </div>
      <footer>
        <a href={linkTo(run.key, "sample", sample.id)}>
          Answer {sample.completion}
          {sample.segment > 0 && `, part ${sample.segment}`}
        </a>
        <span>{formatCount(sample.length)} tokens</span>
        <span>{sample.finish_reason}</span>
        {sample.tool_calls > 0 && (
          <span>
            {sample.tool_calls} tool {sample.tool_calls === 1 ? "call" : "calls"}
          </span>
        )}
        {sample.version !== null && <span>version {sample.version}</span>}
        {sample.reason && (
          <span class="soft">
            <Line text={sample.reason} />
          </span>
        )}
      </footer>
    </article>
  );
}
