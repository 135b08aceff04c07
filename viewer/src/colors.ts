// Scales that people with any color vision can read, for both themes.
import { useEffect, useState } from "preact/hooks";

type Rgb = [number, number, number];

// Cividis (Nuñez, Anderton and Renslow, 2018) on dark; on light its mirror from pale yellow to dark blue.
const DARK = [
  "#16181d",
  "#153a72",
  "#3b496c",
  "#575d6d",
  "#707173",
  "#8a8678",
  "#a59c74",
  "#c3b369",
  "#e1cc55",
  "#fee838",
];
const LIGHT = [
  "#ffffff",
  "#fbf0b4",
  "#d9dba0",
  "#aacb9f",
  "#7ab5a4",
  "#4e9aa8",
  "#357ea6",
  "#27629b",
  "#1f4787",
  "#1b2f6b",
];
const BLUE = "#2f78c4";
const ORANGE = "#dd7a1f";

/** Colors for runs and versions, after Okabe and Ito; runs have a letter beside them. */
const SERIES_LIGHT = ["#0868b0", "#c4560a", "#0b8a69", "#a34a86", "#7a6a00", "#3f97d0", "#5b5f6b", "#8a3b12"];
const SERIES_DARK = ["#5aa9ee", "#f0923f", "#3fc29a", "#db8fc0", "#d6c342", "#9bd0f5", "#b4b8c4", "#d58a62"];

function parseHex(text: string): Rgb {
  const value = parseInt(text.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function blend(from: Rgb, to: Rgb, share: number): Rgb {
  return [0, 1, 2].map((place) => Math.round(from[place]! + (to[place]! - from[place]!) * share)) as Rgb;
}

/** A background and the text color that can be read on it. */
export type Paint = { background: string; color: string };

function paint(rgb: Rgb): Paint {
  const light = 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
  return { background: `rgb(${rgb.join(",")})`, color: light > 0.2 ? "#14161a" : "#ffffff" };
}

function linear(channel: number): number {
  const share = channel / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
}

/** The color of a share of a one-sided scale: 0 is nearly the page, 1 the strongest. */
export function sequential(share: number, dark: boolean): Paint {
  const stops = dark ? DARK : LIGHT;
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const floor = Math.min(stops.length - 2, Math.floor(place));
  return paint(blend(parseHex(stops[floor]!), parseHex(stops[floor + 1]!), place - floor));
}

/** The color of a share of a two-sided scale: -1 blue, 0 the page, 1 orange. */
export function diverging(share: number, dark: boolean): Paint {
  const clipped = Math.min(1, Math.max(-1, share));
  const page: Rgb = dark ? [24, 26, 31] : [255, 255, 255];
  return paint(blend(page, parseHex(clipped < 0 ? BLUE : ORANGE), Math.abs(clipped) ** 0.7));
}

/** The line color of the n-th run, version or kind. */
export function seriesColor(place: number, dark: boolean): string {
  const colors = dark ? SERIES_DARK : SERIES_LIGHT;
  return colors[((place % colors.length) + colors.length) % colors.length]!;
}

/** The background of the n-th version. */
export function categorical(place: number, dark: boolean): Paint {
  const page: Rgb = dark ? [24, 26, 31] : [255, 255, 255];
  return paint(blend(page, parseHex(seriesColor(place, dark)), dark ? 0.6 : 0.45));
}

const preference = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

/** The theme that was chosen on this page, or "auto" for the system's. */
export function chosenTheme(): "auto" | "light" | "dark" {
  const chosen = localStorage.getItem("theme");
  return chosen === "light" || chosen === "dark" ? chosen : "auto";
}

export function isDark(): boolean {
  const chosen = chosenTheme();
  return chosen === "auto" ? preference.matches : chosen === "dark";
}

/** Set the theme, and keep it for the next visit. */
export function setTheme(theme: "auto" | "light" | "dark"): void {
  localStorage.setItem("theme", theme);
  applyTheme();
}

export function applyTheme(): void {
  document.documentElement.dataset["theme"] = chosenTheme();
  for (const listener of listeners) listener();
}

preference.addEventListener("change", applyTheme);

/** Whether the page is dark now; renders again when that changes. */
export function useDark(): boolean {
  const [dark, setDark] = useState(isDark());
  useEffect(() => {
    const listener = () => setDark(isDark());
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  return dark;
}

/** The page's colors for a canvas. */
export function canvasColors(dark: boolean): {
  text: string;
  faint: string;
  grid: string;
  page: string;
  accent: string;
} {
  return dark
    ? { text: "#e4e6eb", faint: "#8d929e", grid: "#272a31", page: "#16181d", accent: "#5aa9ee" }
    : { text: "#1a1c21", faint: "#6b7080", grid: "#eceef2", page: "#ffffff", accent: "#0868b0" };
}
