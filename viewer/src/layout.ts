// Tokens set in lines of equal height, so that any number of them opens at once and only lines in sight are drawn.
import type { Tokens } from "./api";
import { splitHidden } from "./text";

export interface Ink {
  text: string;
  /** "ws": a sign for whitespace; "ctl": a sign for a control; "": the text itself. */
  kind: "" | "ws" | "ctl";
}

export interface Piece {
  token: number;
  inks: Ink[];
}

export interface Layout {
  lines: Piece[][];
  /** The line on which a token begins. */
  lineOf: Int32Array;
}

const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|[\u{1f000}-\u{1faff}]|[\u{20000}-\u{3fffd}]/u;
const COMBINING = /\p{M}/u;
const PLAIN = /^[\x21-\x7e]*$/;
const WHITESPACE: Record<string, string> = { " ": "·", "\n": "⏎", "\u00a0": "⍽", "\u3000": "□" };

/** Columns of a monospaced font that a text takes. */
export function measureColumns(text: string): number {
  if (PLAIN.test(text)) return text.length;
  let columns = 0;
  for (const character of text) columns += COMBINING.test(character) ? 0 : WIDE.test(character) ? 2 : 1;
  return columns;
}

/** The bytes of a token that is no text, as ‹e2 80›. */
export function showBytes(base64: string): string {
  return `‹${[...atob(base64)].map((byte) => byte.charCodeAt(0).toString(16).padStart(2, "0")).join(" ")}›`;
}

/** What is drawn for a token's text. */
export function inkText(text: string): Ink[] {
  if (PLAIN.test(text)) return text ? [{ text, kind: "" }] : [];
  const inks: Ink[] = [];
  for (const run of splitHidden(text)) {
    if (run.mark) inks.push({ text: run.text.replace("\t", ""), kind: "ctl" });
    else for (const piece of run.text.split(/([ \n\u00a0\u3000])/)) if (piece) inks.push(WHITESPACE[piece] ? { text: piece === "\n" ? "⏎" : WHITESPACE[piece]!, kind: "ws" } : { text: piece, kind: "" });
  }
  return inks;
}

/** Set all tokens in lines of so many columns. A newline ends its line. */
export function layOut(tokens: Tokens, columns: number): Layout {
  const lines: Piece[][] = [[]];
  const lineOf = new Int32Array(tokens.ids.length);
  let used = 0;
  const breakLine = () => {
    lines.push([]);
    used = 0;
  };
  const place = (token: number, inks: Ink[], width: number) => {
    if (used + width > columns && used > 0) breakLine();
    lines[lines.length - 1]!.push({ token, inks });
    used += width;
  };
  for (let token = 0; token < tokens.ids.length; token++) {
    const text = tokens.texts[token];
    const inks = text == null ? [{ text: showBytes(tokens.bytes[token] ?? ""), kind: "ctl" } as Ink] : inkText(text);
    if (inks.length === 0) inks.push({ text: "∅", kind: "ctl" });
    let first = true;
    let group: Ink[] = [];
    let width = 0;
    const flush = () => {
      if (group.length) place(token, group, width);
      if (first && group.length) lineOf[token] = lines.length - 1;
      if (group.length) first = false;
      group = [];
      width = 0;
    };
    for (const ink of inks) {
      for (const chunk of cutWide(ink, columns)) {
        const size = measureColumns(chunk.text);
        if (width + size > columns) flush();
        group.push(chunk);
        width += size;
      }
      if (ink.kind === "ws" && ink.text === "⏎") {
        flush();
        breakLine();
      }
    }
    flush();
  }
  if (lines[lines.length - 1]!.length === 0) lines.pop();
  return { lines, lineOf };
}

function cutWide(ink: Ink, columns: number): Ink[] {
  if (measureColumns(ink.text) <= columns) return [ink];
  const half = Math.max(1, Math.floor(columns / 2));
  const characters = [...ink.text];
  const chunks: Ink[] = [];
  for (let place = 0; place < characters.length; place += half) chunks.push({ text: characters.slice(place, place + half).join(""), kind: ink.kind });
  return chunks;
}
