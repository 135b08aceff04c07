// Numbers, times and sizes as people read them. A missing value is a dash.
export const DASH = "–";

/** A number with at most four significant digits. */
export function formatNumber(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return shorten(value).replaceAll("-", "−");
}

function shorten(value: number): string {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3)
    return value
      .toExponential(2)
      .replace("e+", "e")
      .replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

/** A number with a fixed number of decimals, so that columns align. */
export function formatFixed(value: number | null | undefined, decimals = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return value.toFixed(decimals).replace("-", "−");
}

/** The same with its sign. */
export function formatSigned(value: number | null | undefined, decimals = 3): string {
  const text = formatFixed(value, decimals);
  return value !== null && value !== undefined && value > 0 ? `+${text}` : text;
}

/** A whole number with separators. */
export function formatCount(value: number | null | undefined): string {
  return value === null || value === undefined ? DASH : value.toLocaleString("en-US");
}

/** Seconds as 0.42 s, 12 s, 3 m 05 s, 2 h 07 m. */
export function formatSeconds(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} m ${pad(Math.floor(seconds % 60))} s`;
  return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} m`;
}

function pad(value: number): string {
  return String(value).padStart(2, "0");
}

/** A moment (unix seconds) in local time. */
export function formatTime(unix: number | null | undefined): string {
  if (!unix) return DASH;
  const moment = new Date(unix * 1000);
  const day = `${moment.getFullYear()}-${pad(moment.getMonth() + 1)}-${pad(moment.getDate())}`;
  return `${day} ${pad(moment.getHours())}:${pad(moment.getMinutes())}:${pad(moment.getSeconds())}`;
}

/** How long ago a moment (unix seconds) was. */
export function formatAge(unix: number | null | undefined): string {
  if (!unix) return DASH;
  const seconds = Math.max(0, Date.now() / 1000 - unix);
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

/** Bytes in decimal units. */
export function formatBytes(bytes: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (bytes >= 1000 && place < units.length - 1) {
    bytes /= 1000;
    place++;
  }
  return `${place === 0 ? bytes : bytes.toFixed(1)} ${units[place]}`;
}

/** Any value of a config on one line. */
export function formatValue(value: unknown): string {
  if (value === null || value === undefined) return "none";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));
  return typeof value === "string" ? value : JSON.stringify(value);
}
