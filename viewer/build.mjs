// Builds the page into the folder that is named (default: the package's assets), the same bytes on every machine.
import { build } from "esbuild";
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const out = process.argv[2] ?? "../src/hearth/viewer/assets";
rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
await build({
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) cpSync(join("src", name), join(out, name));
const licenses = ["preact", "uplot"].map((name) => {
  const { version } = JSON.parse(readFileSync(join("node_modules", name, "package.json"), "utf8"));
  return `${name} ${version}\n\n${readFileSync(join("node_modules", name, "LICENSE"), "utf8").trim()}\n`;
});
writeFileSync(join(out, "LICENSES.txt"), licenses.join(`\n${"-".repeat(80)}\n\n`));
