// The page's frame: where one is, the views of a run, the theme and the keys.
import "./theme.css";
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useApi, runUrl, type RunDetail } from "./api";
import { applyTheme, chosenTheme, setTheme } from "./colors";
import { KeyList, focusSearch, useKeys } from "./keys";
import { RUN_PAUSE_MS, useConnected } from "./live";
import { currentLink, followLinks, linkTo, navigate, useRoute } from "./router";
import { State } from "./signs";
import { copyText, Empty, Failure, Line, Notices } from "./text";
import { CompareView } from "./views/compare";
import { ConfigView } from "./views/config";
import { CurvesView } from "./views/curves";
import { GroupView } from "./views/group";
import { PromptView } from "./views/prompt";
import { PromptsView } from "./views/prompts";
import { RunsView } from "./views/runs";
import { SampleView } from "./views/sample";
import { SamplesView } from "./views/samples";
import { TimeView } from "./views/time";

const TABS = [
  ["curves", "Curves"],
  ["time", "Time"],
  ["samples", "Samples"],
  ["prompts", "Prompts"],
  ["config", "Config"],
] as const;
const TAB_OF: Record<string, string> = { sample: "samples", group: "samples", prompt: "prompts" };
const THEME_SIGNS = {
  auto: "M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zm0 1.5v10A5 5 0 0 1 8 3z",
  light:
    "M8 4.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM7.3.5h1.4v2.4H7.3zm0 12.6h1.4v2.4H7.3zM.5 7.3h2.4v1.4H.5zm12.6 0h2.4v1.4h-2.4zM2.2 3.2l1-1L4.9 4l-1 1zm8.9 8.8 1-1 1.7 1.8-1 1zm0-8 1.7-1.8 1 1L12.1 5zM2.2 12.8 3.9 11l1 1-1.7 1.8z",
  dark: "M6.3 1.8a6.5 6.5 0 1 0 7.9 7.9A5.5 5.5 0 0 1 6.3 1.8z",
};
const NEXT_THEME = { auto: "light", light: "dark", dark: "auto" } as const;

function Page() {
  const { path } = useRoute();
  const [listing, setListing] = useState(false);
  const [theme, setShownTheme] = useState(chosenTheme());
  const run = path[0] === "run" ? (path[1] ?? null) : null;
  const view = path[2] ?? "curves";
  const tab = TAB_OF[view] ?? view;
  const detail = useApi<RunDetail>(run ? runUrl(run) : null, run ?? undefined, undefined, RUN_PAUSE_MS);
  const switchTheme = () => {
    setTheme(NEXT_THEME[theme]);
    setShownTheme(NEXT_THEME[theme]);
  };
  const openTab = (place: number) => () => run && navigate(linkTo(run, TABS[place]![0]));
  useKeys({
    "?": ["List the keys", () => setListing(true)],
    "/": ["Search", focusSearch],
    t: ["Light, dark, or the system's theme", switchTheme],
    c: ["Copy the link of this view", copyLink],
    0: ["Table of runs", () => navigate("/runs")],
    ...(run ? Object.fromEntries(TABS.map(([, title], place) => [place + 1, [title, openTab(place)]])) : {}),
  });
  useEffect(() => {
    const name = detail.data && run ? detail.data.name : path[0] === "compare" ? "Compare" : "Runs";
    document.title = run ? `${name} · ${tab} · Hearth` : `${name} · Hearth`;
  }, [detail.data?.name, run, tab, path[0]]);
  return (
    <div class="frame" onClick={followLinks}>
      <nav class="top" aria-label="Hearth">
        <a class="brand" href="/runs" title="Table of runs">
          <svg viewBox="0 0 16 16" aria-hidden="true">
            <path fill="currentColor" d="M2 14V7a6 6 0 0 1 12 0v7h-3.5V7.2a2.5 2.5 0 0 0-5 0V14z" />
          </svg>
          Hearth
        </a>
        {run && (
          <>
            <div class="crumbs">
              <span class="slash" aria-hidden="true">
                /
              </span>
              <a class="cut" href={linkTo(run, "curves")}>
                <Line text={detail.data?.name ?? run} />
              </a>
              {detail.data && <State state={detail.data.state} text={detail.data.state_text} />}
            </div>
            <div class="tabs">
              {TABS.map(([name, title]) => (
                <a key={name} href={linkTo(run, name)} aria-current={tab === name ? "page" : undefined}>
                  {title}
                </a>
              ))}
            </div>
          </>
        )}
        <span class="grow" />
        <Connection />
        <button class="quiet hide-narrow" onClick={copyLink} title="Copy the link of this view (c)">
          Copy link
        </button>
        <button
          class="quiet"
          onClick={switchTheme}
          title={`Theme: ${theme === "auto" ? "the system's" : theme} (t)`}
          aria-label="Switch the theme"
        >
          <svg class="icon" viewBox="0 0 16 16" aria-hidden="true">
            <path fill="currentColor" fill-rule="evenodd" d={THEME_SIGNS[theme]} />
          </svg>
        </button>
        <button class="quiet" onClick={() => setListing(true)} title="List the keys (?)" aria-label="List the keys">
          ?
        </button>
      </nav>
      <Routed path={path} detail={detail.data} error={detail.error} />
      {listing && <KeyList onClose={() => setListing(false)} />}
      <Notices />
    </div>
  );
}

function Connection() {
  const connected = useConnected();
  return (
    <span
      class={connected ? "link-state on" : "link-state"}
      title={connected ? "New steps show up by themselves" : "The viewer's server does not answer"}
    >
      {connected ? "Live" : "Offline"}
    </span>
  );
}

function copyLink(): void {
  void copyText(currentLink(), "Link");
}

function Routed({ path, detail, error }: { path: string[]; detail: RunDetail | null; error: string | null }) {
  if (path.length === 0 || path[0] === "runs") return <RunsView />;
  if (path[0] === "compare") return <CompareView />;
  if (path[0] !== "run" || !path[1])
    return (
      <main class="view">
        <Empty title="There is no such page">
          <a href="/runs">Table of runs</a>
        </Empty>
      </main>
    );
  if (error && !detail)
    return (
      <main class="view">
        <Failure text={error} />
      </main>
    );
  if (!detail || detail.key !== path[1]) return <main class="view" aria-busy="true" />;
  const view = path[2] ?? "curves";
  const rest = path.slice(3).join("/");
  const key = `${detail.key} ${view}`;
  if (view === "curves") return <CurvesView key={key} run={detail} />;
  if (view === "time") return <TimeView key={key} run={detail} />;
  if (view === "samples") return <SamplesView key={key} run={detail} />;
  if (view === "prompts") return <PromptsView key={key} run={detail} />;
  if (view === "config") return <ConfigView key={key} run={detail} />;
  if (view === "group") return <GroupView key={key} run={detail} name={rest} />;
  if (view === "prompt") return <PromptView key={key} run={detail} name={rest} />;
  if (view === "sample") return <SampleView key={key} run={detail} id={rest} />;
  return (
    <main class="view">
      <Empty title="There is no such view">
        <a href={linkTo(detail.key, "curves")}>Curves of this run</a>
      </Empty>
    </main>
  );
}

applyTheme();
render(<Page />, document.getElementById("app")!);
