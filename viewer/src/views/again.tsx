// Ask again: the same sample once more from its seed and weights, or others, beside the original.
import { useEffect, useState } from "preact/hooks";
import { fetchJson, runUrl, type Job, type RunDetail, type Sample } from "../api";
import { formatCount, formatFixed } from "../format";
import { Failure, Text } from "../text";

const POLL_MS = 400;

export function AskAgain({ run, sample }: { run: RunDetail; sample: Sample }) {
  const [exact, setExact] = useState(true);
  const [count, setCount] = useState(1);
  const [job, setJob] = useState<Job | null>(null);
  const [id, setId] = useState<string | null>(null);
  const [failure, setFailure] = useState<string | null>(null);
  useEffect(() => {
    if (id === null) return;
    let timer = 0;
    let current = true;
    const look = async () => {
      try {
        const found = await fetchJson<Job>(`/api/jobs/${encodeURIComponent(id)}`);
        if (!current) return;
        setJob(found);
        if (found.state === "running") timer = setTimeout(look, POLL_MS);
      } catch (error) {
        if (current) setFailure((error as Error).message);
      }
    };
    void look();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [id]);
  const ask = async () => {
    setFailure(null);
    setJob({ state: "running", text: "", answers: [] });
    setId(null);
    try {
      const body = JSON.stringify({ sample: sample.id, count: exact ? 1 : count, exact });
      const answer = await fetchJson<{ job: string }>(runUrl(run.key, "/again"), {
        method: "POST",
        body,
        headers: { "content-type": "application/json" },
      });
      setId(answer.job);
    } catch (error) {
      setJob(null);
      setFailure((error as Error).message);
    }
  };
  const running = job?.state === "running" && failure === null;
  return (
    <div class="view">
      <div class="page">
        <div class="bar wrap">
          <div class="segments" role="group" aria-label="What to draw">
            <button aria-pressed={exact} onClick={() => setExact(true)}>
              The same seed
            </button>
            <button aria-pressed={!exact} onClick={() => setExact(false)}>
              Other seeds
            </button>
          </div>
          {!exact && (
            <label class="check small soft">
              Answers
              <input
                type="number"
                min="1"
                max="16"
                value={count}
                onChange={(event) => setCount(Math.max(1, Math.min(16, Number(event.currentTarget.value) || 1)))}
              />
            </label>
          )}
          <button class="primary" disabled={!sample.again.possible || running} onClick={ask}>
            {running ? "Asking" : "Ask again"}
          </button>
          <span class="soft" role="status">
            {running ? job.text || "Starting" : sample.again.reason}
          </span>
        </div>
        {failure && <Failure text={failure} />}
        {job?.state === "failed" && <Failure text={job.text || "The job failed."} />}
        <div class="columns">
          <article class="card">
            <header>
              <span class="score">{formatFixed(sample.reward)}</span>
              <span class="grow" />
              <span class="badge">original</span>
            </header>
            <div class="body" tabIndex={0}>
              <Text text={sample.text} />
            </div>
            <footer>
              <span>{formatCount(sample.length)} tokens</span>
              <span>seed {sample.seeds.join(", ")}</span>
            </footer>
          </article>
          {(job?.answers ?? []).map((answer, place) => (
            <Answer key={place} answer={answer} original={sample.text} />
          ))}
        </div>
      </div>
    </div>
  );
}

function Answer({ answer, original }: { answer: Job["answers"][number]; original: string }) {
  const common = commonLength(answer.text, original);
  return (
    <article class="card">
      <header>
        <span class="score">{answer.reward === undefined ? "" : formatFixed(answer.reward)}</span>
        <span class="grow" />
        {answer.equal === null ? (
          <span class="badge">other seed</span>
        ) : answer.equal ? (
          <span class="badge strong">equal, token for token</span>
        ) : (
          <span class="badge warn">differs</span>
        )}
      </header>
      <div class="body" tabIndex={0}>
        <Text text={answer.text} match={answer.equal === false ? [common, answer.text.length] : null} />
      </div>
      <footer>
        <span>{formatCount(answer.tokens.length)} tokens</span>
        <span>seed {answer.seed}</span>
      </footer>
    </article>
  );
}

function commonLength(left: string, right: string): number {
  let length = 0;
  while (length < left.length && length < right.length && left[length] === right[length]) length++;
  return length;
}
