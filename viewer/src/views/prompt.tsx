// One prompt through time: its answers at each step that had it, and the reward of each.
import { useEffect, useRef } from "preact/hooks";
import { runUrl, useApi, type PromptHistory, type RunDetail } from "../api";
import { sequential, useDark } from "../colors";
import { formatFixed } from "../format";
import { useKeys } from "../keys";
import { linkTo, navigate, setQuery, useRoute } from "../router";
import { Empty, Pending } from "../text";
import { AnswerCard, PromptBox } from "./group";

type Step = PromptHistory["steps"][number];

export function PromptView({ run, name }: { run: RunDetail; name: string }) {
  const { query } = useRoute();
  const { data, error } = useApi<PromptHistory>(runUrl(run.key, `/prompts/${encodeURIComponent(name)}`), run.key);
  const list = useRef<HTMLDivElement>(null);
  const steps = data?.steps ?? [];
  // A row can come more than once in a step, as groups of different epochs.
  const [step, index] = [query.get("step"), query.get("index")];
  const asked = steps.findIndex((place) => String(place.step) === step && (!index || String(place.index) === index));
  const cursor = asked >= 0 ? asked : steps.length - 1;
  const [kind, row] = name.split(".");
  const move = (change: number) => {
    const step = steps[Math.max(0, Math.min(steps.length - 1, cursor + change))];
    if (step) setQuery({ step: step.step, index: step.index });
  };
  const shown = steps[cursor];
  const openGroup = () =>
    shown &&
    navigate(
      linkTo(run.key, "group", kind === "train" ? `train.${shown.index}` : `${kind}.${shown.index}.${shown.step}`),
    );
  useKeys({
    j: ["Next step", () => move(1)],
    ArrowDown: ["Next step", () => move(1)],
    k: ["Step before", () => move(-1)],
    ArrowUp: ["Step before", () => move(-1)],
    Home: ["First step", () => move(-steps.length)],
    End: ["Last step", () => move(steps.length)],
    Enter: ["Open the step's group", openGroup],
  });
  useEffect(() => list.current?.querySelector(".cursor")?.scrollIntoView({ block: "nearest" }), [cursor, data]);
  if (!data) return <Pending error={error} />;
  const rewards = steps.flatMap((step) => step.samples.flatMap(({ reward }) => (reward === null ? [] : [reward])));
  const [low, high] = [Math.min(0, ...rewards), Math.max(0, ...rewards)];
  return (
    <main class="view fixed">
      <div class="toolbar">
        <h2>Row {row}</h2>
        <span class="soft">
          {kind === "eval" ? "held-out" : "training"} · {steps.length} {steps.length === 1 ? "time" : "times"}
        </span>
        <span class="grow" />
        {shown && <button onClick={openGroup}>Group side by side</button>}
      </div>
      <PromptBox prompt={data.prompt} truth={data.ground_truth} />
      {!shown ? (
        <Empty title="No answer to this prompt is on record" />
      ) : (
        <div class="split" style={{ gridTemplateColumns: "296px minmax(0, 1fr)" }}>
          <div class="filters" ref={list} role="listbox" aria-label="Steps" style={{ gap: "0", padding: "8px" }}>
            {steps.map((step, place) => (
              <StepLine
                key={`${step.step}.${step.index}`}
                step={step}
                low={low}
                high={high}
                current={place === cursor}
                onChoose={() => setQuery({ step: step.step, index: step.index })}
              />
            ))}
          </div>
          <div class="view">
            <div class="page">
              <h2>
                Step {shown.step} <span class="faint">mean {formatFixed(shown.mean)}</span>
              </h2>
              <div class="columns">
                {shown.samples.map((sample) => (
                  <AnswerCard key={sample.id} run={run} sample={sample} />
                ))}
              </div>
            </div>
          </div>
        </div>
      )}
    </main>
  );
}

function StepLine({
  step,
  low,
  high,
  current,
  onChoose,
}: {
  step: Step;
  low: number;
  high: number;
  current: boolean;
  onChoose: () => void;
}) {
  const dark = useDark();
  return (
    <button class={current ? "step-line cursor" : "step-line"} role="option" aria-selected={current} onClick={onChoose}>
      <span>step {step.step}</span>
      <span class="number">{formatFixed(step.mean)}</span>
      <span class="dots" aria-label={step.samples.map(({ reward }) => formatFixed(reward, 2)).join(", ")}>
        {step.samples.slice(0, 10).map(({ id, reward }) => (
          <i
            key={id}
            title={formatFixed(reward)}
            style={
              reward === null
                ? {}
                : { background: sequential(high > low ? (reward - low) / (high - low) : 1, dark).background }
            }
          />
        ))}
      </span>
    </button>
  );
}
