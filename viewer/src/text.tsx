// Text that a model wrote, shown as text: controls become marks, long text is cut, matches are marked.
import { Fragment, type ComponentChildren } from "preact";
import { useState } from "preact/hooks";

export interface Run {
  text: string;
  /** Shown in place of characters that would be invisible or would change how others are drawn. */
  mark: boolean;
  title?: string;
}

// C0 and C1 controls but newline, soft hyphen, bidi and zero-width controls, line separators, tags, lone
// surrogates; and of combining characters all after the fourth, which would pile up over other lines.
const HIDDEN =
  /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]|\p{Surrogate}|(?<=\p{M}{4})\p{M}+/gu;
const SHORT = 20_000;
const NAMES: Record<number, string> = {
  0: "NUL",
  7: "BEL",
  8: "BS",
  9: "TAB",
  13: "CR",
  27: "ESC",
  127: "DEL",
  0xad: "SHY",
  0x200b: "ZWSP",
  0x200c: "ZWNJ",
  0x200d: "ZWJ",
  0x200e: "LRM",
  0x200f: "RLM",
  0x202a: "LRE",
  0x202b: "RLE",
  0x202c: "PDF",
  0x202d: "LRO",
  0x202e: "RLO",
  0x2060: "WJ",
  0x2066: "LRI",
  0x2067: "RLI",
  0x2068: "FSI",
  0x2069: "PDI",
  0xfeff: "BOM",
};

/** "U+202E" of the first character. */
export function nameCode(text: string): string {
  return `U+${text.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}`;
}

function markHidden(text: string): Run {
  const code = text.codePointAt(0)!;
  const name = NAMES[code];
  const title = name ? `${nameCode(text)} ${name}` : nameCode(text);
  if (code === 9) return { text: "→\t", mark: true, title };
  if (code < 32) return { text: name ?? nameCode(text), mark: true, title };
  const count = [...text].length;
  return { text: count > 1 ? `${nameCode(text)} ×${count}` : nameCode(text), mark: true, title };
}

/** The text cut into what is shown as it is and marks for what is not. */
export function splitHidden(text: string): Run[] {
  const runs: Run[] = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) runs.push({ text: text.slice(end, match.index), mark: false });
    runs.push(markHidden(match[0]));
    end = match.index + match[0].length;
  }
  if (end < text.length) runs.push({ text: text.slice(end), mark: false });
  return runs;
}

/** Text on one line or many, isolated from what stands around it; `match` is marked. */
export function Visible({
  text,
  match,
  specials,
}: {
  text: string;
  match?: [number, number] | null;
  specials?: string[];
}) {
  if (match && match[1] > match[0]) {
    return (
      <bdi dir="auto">
        <Runs text={text.slice(0, match[0])} />
        <mark>
          <Runs text={text.slice(match[0], match[1])} />
        </mark>
        <Runs text={text.slice(match[1])} />
      </bdi>
    );
  }
  return (
    <bdi dir="auto">
      <Runs text={text} specials={specials} />
    </bdi>
  );
}

function Runs({ text, specials }: { text: string; specials?: string[] }) {
  if (specials?.length) {
    const pattern = new RegExp(`(${specials.map((special) => special.replace(/[^\w\s]/g, "\\$&")).join("|")})`);
    return (
      <>
        {text.split(pattern).map((piece, place) =>
          place % 2 ? (
            <span key={place} class="special-text">
              <Runs text={piece} />
            </span>
          ) : (
            <Runs key={place} text={piece} />
          ),
        )}
      </>
    );
  }
  return (
    <>
      {splitHidden(text).map((run, place) =>
        run.mark ? (
          <span key={place} class="mark" title={run.title}>
            {run.text}
          </span>
        ) : (
          <Fragment key={place}>{run.text}</Fragment>
        ),
      )}
    </>
  );
}

/** A text of one line for a table: newlines are shown as signs. */
export function Line({ text, match }: { text: string; match?: [number, number] | null }) {
  return <Visible text={text.replaceAll("\n", "⏎")} match={match} />;
}

interface TextProps {
  text: string;
  match?: [number, number] | null;
  /** Special tokens, which are drawn faint. */
  specials?: string[];
  limit?: number;
}

/** A whole text. What is longer than `limit` characters is cut, with a button for more. */
export function Text({ text, match, specials, limit = SHORT }: TextProps) {
  const [shown, setShown] = useState(limit);
  const rest = text.length - shown;
  return (
    <div class="text">
      <Visible text={rest > 0 ? cutAt(text, shown) : text} match={match} specials={specials} />
      {rest > 0 && (
        <div class="more">
          <button onClick={() => setShown(shown + 5 * SHORT)}>Show more</button>
          <span class="faint">{rest.toLocaleString("en-US")} more characters</span>
        </div>
      )}
      {text === "" && <span class="faint">empty</span>}
    </div>
  );
}

/** The first characters of a text; a pair of surrogates stays whole. */
export function cutAt(text: string, length: number): string {
  const last = text.charCodeAt(length - 1);
  return text.slice(0, last >= 0xd800 && last < 0xdc00 ? length - 1 : length);
}

/** Put text on the clipboard and say so on the page. */
export async function copyText(text: string, what: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    say(`The browser refused to copy ${what.toLowerCase()}`);
  }
}

let sayer: (text: string) => void = () => {};

/** Show a line at the foot of the page for a moment. */
export function say(text: string): void {
  sayer(text);
}

/** The place where `say` shows its lines. */
export function Notices() {
  const [notice, setNotice] = useState({ text: "", count: 0 });
  sayer = (text) => {
    const count = notice.count + 1;
    setNotice({ text, count });
    setTimeout(() => setNotice((last) => (last.count === count ? { text: "", count } : last)), 2500);
  };
  return (
    <div class={notice.text ? "notice shown" : "notice"} role="status">
      {notice.text}
    </div>
  );
}

/** What stands where there is nothing to show: what is missing, and what to do. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <h2>{title}</h2>
      {children && <div>{children}</div>}
    </div>
  );
}

/** A page whose data are still asked for, or cannot be had. */
export function Pending({ error }: { error: string | null }) {
  return (
    <main class="view" aria-busy={!error}>
      {error && <Failure text={error} />}
    </main>
  );
}

/** An error of the server. */
export function Failure({ text }: { text: string }) {
  return (
    <div class="failure" role="alert">
      <span aria-hidden="true">!</span>
      <div>{text}</div>
    </div>
  );
}
