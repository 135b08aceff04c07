// The exact view of a sample: each token with its color, and all that is known of the one under the cursor.
import { Component } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Sample } from "./api";
import { useDark } from "./colors";
import { DASH, formatCount, formatNumber, formatSigned } from "./format";
import { useKeys } from "./keys";
import { inkText, layOut, showBytes, type Layout, type Piece } from "./layout";
import { setQuery } from "./router";
import { colorNames, makeScale, titleOf, type Scale } from "./scales";

const LINE = 22;
const MARGIN = 72;

interface TokenViewProps {
  sample: Sample;
  color: string;
  cursor: number;
  onCursor: (token: number) => void;
  onHover: (token: number | null) => void;
}

export function TokenView({ sample, color, cursor, onCursor, onHover }: TokenViewProps) {
  const dark = useDark();
  const names = useMemo(() => colorNames(sample), [sample]);
  const scale = useMemo(() => makeScale(sample, color, dark), [sample, color, dark]);
  const next = () => setQuery({ color: [...names, "none"][(names.indexOf(color) + 1) % (names.length + 1)] });
  useKeys({ m: ["Next coloring of tokens", next] });
  return (
    <section class="token-view" aria-label="Tokens">
      <div class="token-bar">
        <label class="check small soft">
          Color by
          <select value={scale ? color : "none"} onChange={(event) => setQuery({ color: event.currentTarget.value })}>
            {names.map((name) => (
              <option key={name} value={name}>
                {titleOf(name)}
              </option>
            ))}
            <option value="none">nothing</option>
          </select>
        </label>
        {scale && <Legend scale={scale} />}
        <span class="grow" />
        <span class="small faint">
          {formatCount(sample.tokens.ids.length)} tokens, {formatCount(sample.length)} sampled
        </span>
      </div>
      {scale && <Strip sample={sample} scale={scale} cursor={cursor} onChoose={onCursor} />}
      <Lines sample={sample} scale={scale} cursor={cursor} onCursor={onCursor} onHover={onHover} />
    </section>
  );
}

function Legend({ scale }: { scale: Scale }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const context = canvas.current?.getContext("2d");
    if (!context) return;
    const low = scale.ends.length === 3 ? -1 : 0;
    for (let x = 0; x < 140; x++) {
      context.fillStyle = scale.paint(low + ((1 - low) * x) / 139).background;
      context.fillRect(x, 0, 1, 12);
    }
  }, [scale]);
  if (scale.ends.length === 0) {
    return (
      <span class="scale">
        {scale.classes.map(({ label, paint }) => (
          <span key={label} class="badge" style={paint}>
            {label}
          </span>
        ))}
      </span>
    );
  }
  return (
    <span class="scale" aria-label={`Scale from ${scale.ends.join(" to ")}`}>
      {scale.ends[0]}
      <canvas ref={canvas} width="140" height="12" />
      {scale.ends[scale.ends.length - 1]}
    </span>
  );
}

/** The whole sample as one strip: the strongest value of the tokens under each pixel. A click goes there. */
function Strip({
  sample,
  scale,
  cursor,
  onChoose,
}: {
  sample: Sample;
  scale: Scale;
  cursor: number;
  onChoose: (token: number) => void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const count = sample.tokens.ids.length;
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = canvas.current!;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const element = canvas.current!;
    const context = element.getContext("2d")!;
    element.width = width;
    element.height = 28;
    for (let x = 0; x < width; x++) {
      const from = Math.floor((x / width) * count);
      const to = Math.max(from + 1, Math.floor(((x + 1) / width) * count));
      let strongest: number | null = null;
      for (let token = from; token < to; token++) {
        const share = scale.share(token);
        if (share !== null && (strongest === null || Math.abs(share) > Math.abs(strongest))) strongest = share;
      }
      if (strongest === null) continue;
      context.fillStyle = scale.paint(strongest).background;
      context.fillRect(x, 0, 1, 28);
    }
    context.fillStyle = getComputedStyle(element).color;
    context.fillRect(Math.round(((cursor + 0.5) / count) * width) - 1, 0, 2, 28);
  }, [sample, scale, cursor, width]);
  return (
    <canvas
      ref={canvas}
      class="strip"
      aria-hidden="true"
      onClick={(event) =>
        onChoose(Math.min(count - 1, Math.floor((event.offsetX / canvas.current!.clientWidth) * count)))
      }
    />
  );
}

let characterWidth = 0;

/** Pixels of a character of the token view's font. */
function measureCharacter(box: HTMLElement): number {
  const probe = document.createElement("span");
  probe.className = "token-line";
  probe.textContent = "0".repeat(100);
  probe.style.width = "max-content";
  probe.style.right = "auto";
  box.append(probe);
  const width = (probe.getBoundingClientRect().width - MARGIN) / 100;
  probe.remove();
  return width;
}

function useColumns(box: { current: HTMLDivElement | null }): number {
  const [columns, setColumns] = useState(0);
  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => {
      characterWidth ||= measureCharacter(element);
      setColumns(Math.max(20, Math.floor((element.clientWidth - MARGIN - 24) / characterWidth)));
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return columns;
}

function Lines({ sample, scale, cursor, onCursor, onHover }: { scale: Scale | null } & Omit<TokenViewProps, "color">) {
  const box = useRef<HTMLDivElement>(null);
  const columns = useColumns(box);
  const layout = useMemo<Layout>(
    () => (columns ? layOut(sample.tokens, columns) : { lines: [], lineOf: new Int32Array() }),
    [sample.tokens, columns],
  );
  const [view, setView] = useState({ top: 0, height: 400 });
  const special = useMemo(() => new Set(sample.tokens.special), [sample.tokens]);
  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight });
    element.addEventListener("scroll", measure, { passive: true });
    measure();
    return () => element.removeEventListener("scroll", measure);
  }, [columns]);
  useLayoutEffect(() => {
    const element = box.current!;
    const line = layout.lineOf[cursor];
    if (line === undefined) return;
    const top = line * LINE;
    if (top < element.scrollTop + LINE) element.scrollTop = top - LINE;
    else if (top + 2 * LINE > element.scrollTop + element.clientHeight)
      element.scrollTop = Math.max(0, top - element.clientHeight / 2);
  }, [layout, cursor]);

  const last = sample.tokens.ids.length - 1;
  const move = (token: number) => onCursor(Math.max(0, Math.min(last, token)));
  const moveLine = (change: number) => {
    const line = layout.lineOf[cursor] ?? 0;
    const here = layout.lines[line] ?? [];
    const target = layout.lines[Math.max(0, Math.min(layout.lines.length - 1, line + change))];
    if (!target?.length) return;
    move(
      target[
        Math.min(
          target.length - 1,
          Math.max(
            0,
            here.findIndex(({ token }) => token === cursor),
          ),
        )
      ]!.token,
    );
  };
  const page = Math.max(1, Math.floor(view.height / LINE) - 2);
  useKeys({
    ArrowRight: ["Next token", () => move(cursor + 1)],
    ArrowLeft: ["Token before", () => move(cursor - 1)],
    ArrowDown: ["A line down", () => moveLine(1)],
    ArrowUp: ["A line up", () => moveLine(-1)],
    PageDown: ["A page down", () => moveLine(page)],
    PageUp: ["A page up", () => moveLine(-page)],
    Home: ["First token", () => move(0)],
    End: ["Last token", () => move(last)],
    s: ["First sampled token", () => move(sample.prompt_len)],
  });
  const tokenOf = (event: Event) => {
    const element = (event.target as Element).closest<HTMLElement>(".token");
    return element ? Number(element.dataset["token"]) : null;
  };
  const first = Math.max(0, Math.floor(view.top / LINE) - 2);
  const end = Math.min(layout.lines.length, Math.ceil((view.top + view.height) / LINE) + 2);
  return (
    <div
      ref={box}
      class="token-scroll"
      tabIndex={0}
      aria-label="Tokens of the sample; arrow keys move"
      onMouseOver={(event) => onHover(tokenOf(event))}
      onMouseLeave={() => onHover(null)}
      onClick={(event) => {
        const token = tokenOf(event);
        if (token !== null) onCursor(token);
      }}
    >
      <div class="token-lines" style={{ height: `${layout.lines.length * LINE + 16}px` }}>
        {layout.lines.slice(first, end).map((pieces, place) => {
          const holds = pieces.some(({ token }) => token === cursor);
          return (
            <TokenLine
              key={first + place}
              place={first + place}
              pieces={pieces}
              sample={sample}
              scale={scale}
              special={special}
              cursor={holds ? cursor : null}
            />
          );
        })}
      </div>
    </div>
  );
}

interface TokenLineProps {
  place: number;
  pieces: Piece[];
  sample: Sample;
  scale: Scale | null;
  special: Set<number>;
  /** The token under the cursor where it is on this line. */
  cursor: number | null;
}

/** A line of tokens; drawn again only when what it shows changes. */
class TokenLine extends Component<TokenLineProps> {
  override shouldComponentUpdate(next: TokenLineProps): boolean {
    return (
      next.pieces !== this.props.pieces ||
      next.place !== this.props.place ||
      next.scale !== this.props.scale ||
      next.cursor !== this.props.cursor
    );
  }

  override render({ place, pieces, sample, scale, special, cursor }: TokenLineProps) {
    return (
      <div
        class="token-line"
        data-place={pieces[0]?.token ?? ""}
        style={{ transform: `translateY(${place * LINE}px)` }}
      >
        {pieces.map(({ token, inks }, index) => {
          const share = scale?.share(token) ?? null;
          let classes = "token";
          if (!sample.mask[token]) classes += " given";
          if (special.has(token)) classes += " special";
          if (sample.tokens.texts[token] === null) classes += " bytes";
          if (sample.values["clipped"]?.[token]) classes += " clipped";
          if (token === cursor) classes += " cursor";
          return (
            <span
              key={index}
              class={classes}
              data-token={token}
              style={share === null ? undefined : scale!.paint(share)}
            >
              {inks.map((ink, number) =>
                ink.kind ? (
                  <span key={number} class={ink.kind}>
                    {ink.text}
                  </span>
                ) : (
                  ink.text
                ),
              )}
            </span>
          );
        })}
      </div>
    );
  }
}

/** All that is known of a token. */
export function TokenCard({ sample, token }: { sample: Sample; token: number }) {
  const { ids, texts, bytes } = sample.tokens;
  if (ids[token] === undefined) return null;
  const text = texts[token] ?? null;
  const raw = bytes[token];
  const hex =
    text !== null
      ? [...new TextEncoder().encode(text)].map((byte) => byte.toString(16).padStart(2, "0"))
      : raw
        ? showBytes(raw).slice(1, -1).split(" ")
        : [];
  const number = (name: string) => {
    const value = sample.values[name]?.[token];
    return typeof value === "number" ? value : null;
  };
  const logprobs = ["behavior", "policy", "old", "ref"].filter((name) => sample.values[name]);
  const version = number("version");
  return (
    <section class="token-card" aria-live="polite" aria-label="Token">
      <h3>
        Token {formatCount(token)} of {formatCount(ids.length)}
      </h3>
      <div class="shown">
        {text === null ? (
          <span class="mark">{showBytes(raw ?? "")}</span>
        ) : (
          inkText(text).map((ink, place) => (
            <span key={place} class={ink.kind ? "faint" : ""}>
              {ink.text}
            </span>
          ))
        )}
      </div>
      <dl class="facts">
        <dt>id</dt>
        <dd>
          {ids[token]}
          {sample.tokens.special.includes(token) && " (special)"}
        </dd>
        <dt>bytes</dt>
        <dd class="mono">
          {hex.slice(0, 64).join(" ") || DASH}
          {text === null && " (no text)"}
        </dd>
        <dt>came from</dt>
        <dd>
          {sample.mask[token]
            ? `the policy${version !== null && version >= 0 ? `, version ${version}` : ""}`
            : "the prompt or the environment"}
        </dd>
        {logprobs.map((name) => (
          <LogprobFact key={name} name={name} value={number(name)} />
        ))}
        {number("ratio") !== null && (
          <>
            <dt>ratio</dt>
            <dd>{formatNumber(number("ratio"))}</dd>
          </>
        )}
        {number("gap") !== null && (
          <>
            <dt>trainer − sampler</dt>
            <dd>{formatNumber(number("gap"))}</dd>
          </>
        )}
        {number("advantage") !== null && (
          <>
            <dt>advantage</dt>
            <dd>{formatSigned(number("advantage"), 4)}</dd>
          </>
        )}
        {sample.values["clipped"] && (
          <>
            <dt>clipped</dt>
            <dd>{sample.values["clipped"]![token] ? "yes" : "no"}</dd>
          </>
        )}
        {number("entropy") !== null && (
          <>
            <dt>entropy</dt>
            <dd>{formatNumber(number("entropy"))}</dd>
          </>
        )}
      </dl>
    </section>
  );
}

const SHORT: Record<string, string> = { behavior: "sampler", policy: "trainer", old: "old", ref: "reference" };

function LogprobFact({ name, value }: { name: string; value: number | null }) {
  return (
    <>
      <dt>{SHORT[name]}</dt>
      <dd>
        {value === null ? DASH : `${value.toFixed(5).replace("-", "−")}  (${(100 * Math.exp(value)).toPrecision(3)} %)`}
      </dd>
    </>
  );
}
