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

const WIDE =
  /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|[\u{1f000}-\u{1faff}]|[\u{20000}-\u{3fffd}]/u;
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
    else
      for (const piece of run.text.split(/([ \n\u00a0\u3000])/))
        if (piece)
          inks.push(
            WHITESPACE[piece]
              ? { text: piece === "\n" ? "⏎" : WHITESPACE[piece]!, kind: "ws" }
              : { text: piece, kind: "" },
          );
  }
  return inks;
}

interface Chunk {
  inks: Ink[];
  width: number;
  ends: boolean;
}

/** What is drawn for a token, in chunks that each fit a line; `ends`: the line ends behind it. */
function chunkToken(tokens: Tokens, token: number, columns: number): Chunk[] {
  const text = tokens.texts[token];
  const inks = text == null ? [{ text: showBytes(tokens.bytes[token] ?? ""), kind: "ctl" } as Ink] : inkText(text);
  const chunks: Chunk[] = [{ inks: [], width: 0, ends: false }];
  for (const ink of inks.length ? inks : [{ text: "∅", kind: "ctl" } as Ink]) {
    for (const piece of cutWide(ink, columns)) {
      const size = measureColumns(piece.text);
      let chunk = chunks[chunks.length - 1]!;
      if (chunk.ends || (chunk.width + size > columns && chunk.width > 0))
        chunks.push((chunk = { inks: [], width: 0, ends: false }));
      chunk.inks.push(piece);
      chunk.width += size;
      chunk.ends = piece.kind === "ws" && piece.text === "⏎";
    }
  }
  return chunks;
}

/** Set all tokens in lines of so many columns. A newline ends its line. */
export function layOut(tokens: Tokens, columns: number): Layout {
  const lines: Piece[][] = [[]];
  const lineOf = new Int32Array(tokens.ids.length);
  // Most texts come again and again.
  const known = new Map<string, Chunk[]>();
  let used = 0;
  for (let token = 0; token < tokens.ids.length; token++) {
    const name = tokens.texts[token] ?? `\u0000${tokens.bytes[token]}`;
    let chunks = known.get(name);
    if (!chunks) known.set(name, (chunks = chunkToken(tokens, token, columns)));
    for (let place = 0; place < chunks.length; place++) {
      const { inks, width, ends } = chunks[place]!;
      if (used + width > columns && used > 0) {
        lines.push([]);
        used = 0;
      }
      if (place === 0) lineOf[token] = lines.length - 1;
      lines[lines.length - 1]!.push({ token, inks });
      used += width;
      if (ends) {
        lines.push([]);
        used = 0;
      }
    }
  }
  if (lines[lines.length - 1]!.length === 0) lines.pop();
  return { lines, lineOf };
}

function cutWide(ink: Ink, columns: number): Ink[] {
  if (measureColumns(ink.text) <= columns) return [ink];
  const half = Math.max(1, Math.floor(columns / 2));
  const characters = [...ink.text];
  const chunks: Ink[] = [];
  for (let place = 0; place < characters.length; place += half)
    chunks.push({ text: characters.slice(place, place + half).join(""), kind: ink.kind });
  return chunks;
}
