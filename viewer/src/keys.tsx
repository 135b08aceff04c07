// Keys: each view names what its keys do; "?" lists them.
import { useEffect, useRef, useState } from "preact/hooks";

/** Keys of a view: the key as the browser names it, what it does, and the action. */
export type Bindings = Record<string, [label: string, action: () => void]>;

const stack: { current: Bindings }[] = [];

function isTyping(target: EventTarget | null): boolean {
  return target instanceof Element && target.matches("input:not([type=checkbox]), textarea, select");
}

function press(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") (event.target as HTMLElement).blur();
    return;
  }
  // A button or a link that has the focus keeps its own keys.
  if ((event.key === "Enter" || event.key === " ") && (event.target as Element).matches("a, button, summary, input"))
    return;
  for (let place = stack.length - 1; place >= 0; place--) {
    const binding = stack[place]!.current[event.key];
    if (binding) {
      event.preventDefault();
      binding[1]();
      return;
    }
  }
}

addEventListener("keydown", press);

/** Bind keys while this component is on the page; what is mounted later wins. */
export function useKeys(bindings: Bindings): void {
  const ref = useRef(bindings);
  ref.current = bindings;
  useEffect(() => {
    stack.push(ref);
    return () => void stack.splice(stack.indexOf(ref), 1);
  }, []);
}

/** Put the cursor into the page's search field, if it has one. */
export function focusSearch(): void {
  const field = document.querySelector<HTMLInputElement>("input[type=search]");
  field?.focus();
  field?.select();
}

const NAMES: Record<string, string> = {
  ArrowUp: "↑",
  ArrowDown: "↓",
  ArrowLeft: "←",
  ArrowRight: "→",
  " ": "Space",
  Escape: "Esc",
};

/** The list of keys that work now, over the page. */
export function KeyList({ onClose }: { onClose: () => void }) {
  const close = useRef<HTMLButtonElement>(null);
  const [rows] = useState(() => {
    const found = new Map<string, string[]>();
    for (const { current } of [...stack].reverse()) {
      for (const [key, [label]] of Object.entries(current))
        found.set(label, [...(found.get(label) ?? []), NAMES[key] ?? key]);
    }
    return [...found];
  });
  useEffect(() => close.current?.focus(), []);
  useKeys({ Escape: ["Close this list", onClose] });
  return (
    <div class="overlay" onClick={onClose}>
      <section
        class="dialog"
        role="dialog"
        aria-label="Keys"
        aria-modal="true"
        onClick={(event) => event.stopPropagation()}
      >
        <header class="bar">
          <h2>Keys</h2>
          <span class="grow" />
          <button ref={close} class="quiet" onClick={onClose}>
            Close
          </button>
        </header>
        <dl class="keys">
          {rows.map(([label, keys]) => (
            <div key={label}>
              <dt>{label}</dt>
              <dd>
                {keys.map((key) => (
                  <kbd key={key}>{key}</kbd>
                ))}
              </dd>
            </div>
          ))}
        </dl>
      </section>
    </div>
  );
}
