// The window's width, by which tables choose their columns.
import { useEffect, useState } from "preact/hooks";

/** Pixels; renders again when they change. */
export function useWidth(): number {
  const [width, setWidth] = useState(innerWidth);
  useEffect(() => {
    const listener = () => setWidth(innerWidth);
    addEventListener("resize", listener);
    return () => removeEventListener("resize", listener);
  }, []);
  return width;
}
