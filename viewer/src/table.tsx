// A table of any length: only the rows in sight are on the page.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useKeys } from "./keys";

export interface Column<Row> {
  name: string;
  title: string;
  /** A width of the CSS grid: "64px", "minmax(200px, 1fr)". */
  width: string;
  number?: boolean;
  sortable?: boolean;
  hint?: string;
  render: (row: Row) => ComponentChildren;
}

export interface Sort {
  name: string;
  descending: boolean;
}

interface TableProps<Row> {
  label: string;
  columns: Column<Row>[];
  total: number;
  /** The n-th row, null while it is not there yet. */
  row: (place: number) => Row | null;
  onSight?: (first: number, last: number) => void;
  onOpen: (row: Row, place: number) => void;
  sort?: Sort | null;
  onSort?: (sort: Sort) => void;
  rowHeight?: number;
  /** The row that the keys are at first. */
  start?: number;
  onMove?: (place: number) => void;
  isMuted?: (row: Row) => boolean;
  keys?: Record<string, [label: string, action: (row: Row, place: number) => void]>;
}

// Browsers give up on elements above some 33 million pixels.
const TALLEST = 16_000_000;

export function Table<Row>(props: TableProps<Row>) {
  const { columns, total, rowHeight = 36, sort } = props;
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [cursor, setCursor] = useState(props.start ?? 0);
  const whole = total * rowHeight;
  const tall = Math.min(whole, TALLEST);
  // Very long tables scroll faster than their pixels.
  const stretch = tall > view.height ? (whole - view.height) / (tall - view.height) : 1;
  const first = Math.max(0, Math.floor((view.top * stretch) / rowHeight) - 4);
  const last = Math.min(total - 1, Math.ceil((view.top * stretch + view.height) / rowHeight) + 4);
  const template = columns.map((column) => column.width).join(" ");
  const minWidth = `${measureWidth(columns)}px`;

  useLayoutEffect(() => {
    const element = box.current!;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight - rowHeight });
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    element.addEventListener("scroll", measure, { passive: true });
    measure();
    return () => {
      observer.disconnect();
      element.removeEventListener("scroll", measure);
    };
  }, [rowHeight]);
  useEffect(() => props.onSight?.(first, last), [first, last, total]);
  useEffect(() => {
    if (cursor >= total && total > 0) setCursor(total - 1);
  }, [total]);
  useEffect(() => {
    if (props.start) show(props.start);
  }, []);

  const show = (place: number) => {
    const element = box.current!;
    const top = (place * rowHeight) / stretch;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + rowHeight > element.scrollTop + view.height) element.scrollTop = top + rowHeight - view.height;
  };
  const move = (place: number) => {
    const bounded = Math.max(0, Math.min(total - 1, place));
    setCursor(bounded);
    props.onMove?.(bounded);
    show(bounded);
  };
  const withRow = (action: (row: Row, place: number) => void) => () => {
    const row = props.row(cursor);
    if (row) action(row, cursor);
  };
  const page = Math.max(1, Math.floor(view.height / rowHeight) - 1);
  useKeys({
    j: ["Next row", () => move(cursor + 1)],
    ArrowDown: ["Next row", () => move(cursor + 1)],
    k: ["Previous row", () => move(cursor - 1)],
    ArrowUp: ["Previous row", () => move(cursor - 1)],
    PageDown: ["A page down", () => move(cursor + page)],
    PageUp: ["A page up", () => move(cursor - page)],
    Home: ["First row", () => move(0)],
    End: ["Last row", () => move(total - 1)],
    Enter: ["Open the row", withRow(props.onOpen)],
    ...Object.fromEntries(
      Object.entries(props.keys ?? {}).map(([key, [label, action]]) => [
        key,
        [label, withRow(action)] as [string, () => void],
      ]),
    ),
  });

  const places = Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => first + place);
  const offset = view.top - view.top * stretch;
  return (
    <div ref={box} class="table" role="table" aria-label={props.label} aria-rowcount={total} tabIndex={0}>
      <div class="table-head" role="row" style={{ gridTemplateColumns: template, minWidth, height: `${rowHeight}px` }}>
        {columns.map((column) => (
          <div
            key={column.name}
            role="columnheader"
            class={column.number ? "number" : ""}
            title={column.hint}
            aria-sort={sort?.name === column.name ? (sort.descending ? "descending" : "ascending") : undefined}
          >
            {column.sortable && props.onSort ? (
              <button class="sort" onClick={() => props.onSort!(nextSort(sort, column))}>
                {column.title}
                <span aria-hidden="true" class="arrow">
                  {sort?.name === column.name ? (sort.descending ? "↓" : "↑") : ""}
                </span>
              </button>
            ) : (
              column.title
            )}
          </div>
        ))}
      </div>
      <div class="table-body" style={{ height: `${tall}px`, minWidth }}>
        {places.map((place) => {
          const row = props.row(place);
          const classes = ["table-row", place === cursor && "cursor", row && props.isMuted?.(row) && "muted"];
          return (
            <div
              key={place}
              role="row"
              aria-rowindex={place + 1}
              aria-selected={place === cursor}
              class={classes.filter(Boolean).join(" ")}
              style={{
                gridTemplateColumns: template,
                minWidth,
                height: `${rowHeight}px`,
                transform: `translateY(${place * rowHeight + offset}px)`,
              }}
              onClick={(event) => {
                if ((event.target as Element).closest("a, button, input, label")) return;
                setCursor(place);
                props.onMove?.(place);
                if (row) props.onOpen(row, place);
              }}
            >
              {columns.map((column) => (
                <div key={column.name} role="cell" class={column.number ? "number" : ""}>
                  {row ? column.render(row) : <span class="ghost" />}
                </div>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

const GAP = 16;

/** The least width of a row: its columns' least widths, the gaps between them and the padding. */
function measureWidth<Row>(columns: Column<Row>[]): number {
  return columns.reduce((sum, { width }) => sum + parseFloat(width.replace("minmax(", "")) + GAP, GAP);
}

function nextSort<Row>(sort: Sort | null | undefined, column: Column<Row>): Sort {
  if (sort?.name === column.name) return { name: column.name, descending: !sort.descending };
  return { name: column.name, descending: column.number ?? false };
}
