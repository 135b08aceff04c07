// How a token's value becomes a color, for each value that the record has.
import type { Sample, TokenValues } from "./api";
import { categorical, diverging, sequential, type Paint } from "./colors";
import { formatNumber } from "./format";

export interface Scale {
  name: string;
  title: string;
  /** Ends (and middle) of the legend; the classes where there is no continuous scale. */
  ends: string[];
  classes: { label: string; paint: Paint }[];
  /** From -1 or 0 to 1; null where the token has no value. */
  share: (token: number) => number | null;
  paint: (share: number) => Paint;
}

const TITLES: Record<string, string> = {
  behavior: "Logprob (sampler)",
  policy: "Logprob (trainer)",
  old: "Logprob (old)",
  ref: "Logprob (reference)",
  advantage: "Advantage",
  ratio: "Ratio",
  gap: "Trainer − sampler",
  clipped: "Clipped",
  version: "Weight version",
  entropy: "Entropy",
};

// A token this unlikely has the strongest color: e^-5 is 0.7 %.
const UNLIKELY = 5;

/** The values of a name by token. An advantage of the whole sample is that of each sampled token. */
function valuesOf(sample: Sample, name: string): TokenValues[string] {
  const { advantage } = sample;
  if (name === "advantage" && !sample.values["advantage"] && advantage !== null)
    return sample.mask.map((sampled) => (sampled ? advantage : null));
  return sample.values[name];
}

/** The names of the values that color this sample's tokens, in the order of the menu. */
export function colorNames(sample: Sample): string[] {
  return Object.keys(TITLES).filter((name) =>
    valuesOf(sample, name)?.some((value) => value !== null && !(name === "version" && value === -1)),
  );
}

export function titleOf(name: string): string {
  return TITLES[name] ?? name;
}

/** The scale of a value over a sample, null for none. */
export function makeScale(sample: Sample, name: string, dark: boolean): Scale | null {
  const values = valuesOf(sample, name);
  if (!values) return null;
  const title = titleOf(name);
  if (name === "version") return scaleVersions(title, values, dark);
  if (name === "clipped") {
    const paint = diverging(0.8, dark);
    return {
      name,
      title,
      ends: [],
      classes: [{ label: "clipped", paint }],
      share: (token) => (values[token] ? 1 : null),
      paint: () => paint,
    };
  }
  if (name === "advantage" || name === "gap" || name === "ratio") return scaleSigned(name, title, values, dark);
  const most = name === "entropy" ? Math.max(0.5, quantile(values, 0.98, Math.abs)) : UNLIKELY;
  const ends = name === "entropy" ? ["0", formatNumber(most)] : ["0", `−${UNLIKELY} and less`];
  return {
    name,
    title,
    ends,
    classes: [],
    share: (token) =>
      typeof values[token] === "number" ? Math.min(1, Math.abs(values[token] as number) / most) : null,
    paint: (share) => sequential(share, dark),
  };
}

function scaleSigned(name: string, title: string, values: NonNullable<TokenValues[string]>, dark: boolean): Scale {
  const center = name === "ratio" ? Math.log : (value: number) => value;
  const most = Math.max(
    quantile(values, 0.99, (value) => Math.abs(center(value))),
    name === "advantage" ? 1e-6 : 1e-4,
  );
  const ends =
    name === "ratio"
      ? [formatNumber(Math.exp(-most)), "1", formatNumber(Math.exp(most))]
      : [`−${formatNumber(most)}`, "0", `+${formatNumber(most)}`];
  return {
    name,
    title,
    ends,
    classes: [],
    share: (token) =>
      typeof values[token] === "number" ? Math.max(-1, Math.min(1, center(values[token] as number) / most)) : null,
    paint: (share) => diverging(share, dark),
  };
}

function scaleVersions(title: string, values: NonNullable<TokenValues[string]>, dark: boolean): Scale {
  const versions = [
    ...new Set(values.filter((value): value is number => typeof value === "number" && value >= 0)),
  ].sort((a, b) => a - b);
  const place = new Map(versions.map((version, index) => [version, index]));
  return {
    name: "version",
    title,
    ends: [],
    classes: versions
      .slice(0, 12)
      .map((version, index) => ({ label: String(version), paint: categorical(index, dark) })),
    share: (token) => place.get(values[token] as number) ?? null,
    paint: (share) => categorical(share, dark),
  };
}

function quantile(values: NonNullable<TokenValues[string]>, share: number, measure: (value: number) => number): number {
  const known = Float64Array.from(values.filter((value): value is number => typeof value === "number").map(measure))
    .filter(Number.isFinite)
    .sort();
  return known.length ? known[Math.floor((known.length - 1) * share)]! : 0;
}
