// The versions of a model, and what each update cost. Names come from data: they are only ever set as text.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") element.className = value;
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const percent = (value, digits = 1) => (value === null ? "–" : `${(100 * value).toFixed(digits)}%`);
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}`;
const recall = (entry) =>
  entry.recall === null ? "–" : `${percent(entry.recall)} (${percent(entry.low, 0)}–${percent(entry.high, 0)})`;
const change = (entry) =>
  entry === null ? "–" : `${signed(entry.change)} (${signed(entry.low)} to ${signed(entry.high)})`;

const WHERE = {
  "hold-out": "sealed images, none of them trained on",
  eval: "images given for measuring",
  exemplars: "training exemplars: optimistic",
};

function table(columns, rows, numbers = []) {
  const kind = (index) => (numbers.includes(index) ? { class: "number" } : {});
  const head = make("tr", {}, ...columns.map((text, i) => make("th", { scope: "col", ...kind(i) }, text)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", kind(i), String(cell)))));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

export function versionSection(past) {
  const badges = [
    past.is_served ? make("span", { class: "badge on" }, "served here") : null,
    past.is_current ? make("span", { class: "badge" }, "current") : null,
    past.error || past.is_promoted ? null : make("span", { class: "badge" }, "not promoted when written"),
  ];
  const section = { class: "version", id: `version-${past.version}` };
  const title = make("h2", {}, `Version ${past.version}`, ...badges.filter(Boolean));
  if (past.error) return make("article", section, title, make("p", { class: "error" }, past.error));
  const first = past.parent ? `Added to ${past.parent}` : "First classes";
  const more = Object.entries(past.more_images ?? {}).map(([name, n]) => `${name} (+${n} images)`);
  const added = past.rebalanced
    ? `Rebalanced from ${past.parent}: ${past.rebalanced}`
    : past.corrected ? `Corrected from ${past.parent}: ${past.corrected}` : `${first}: ${[...past.classes_added, ...more].join(", ")}`;
  const isSame = past.rebalanced || past.corrected;
  const facts = [
    ["Written", `${past.when.slice(0, 16).replace("T", " ")} UTC`],
    ["Classes", past.n_classes],
    ["Trained on", isSame ? "nothing new" : past.parent ? `${past.images} new images and what is kept of earlier ones` : `${past.images} images`],
    ["Method", past.method],
    ["Accuracy", percent(past.accuracy)],
    ["Balanced accuracy", percent(past.balanced_accuracy)],
    ["Measured on", WHERE[past.measured_on] ?? past.measured_on],
  ];
  return make(
    "article",
    section,
    title,
    make("p", {}, added),
    make("table", {}, ...facts.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, String(value))))),
    isSame ? null : past.images_sha256
      ? make("p", { class: "quiet" }, "sha256 of the images: ", make("span", { class: "hash" }, past.images_sha256))
      : make("p", { class: "quiet" }, "Images of a patient were removed from it."),
    past.forgetting ? forgettingReport(past.forgetting) : null,
  );
}

function forgettingReport(cost) {
  const verdict = cost.verdict ?? `No verdict: ${cost.note ?? "nothing to measure on"}.`;
  const rows = [
    ...cost.old_classes.map((c) => [c.name, c.images, recall(c.before), recall(c.after), change(c.change)]),
    ...cost.new_classes.map((c) => [c.name, c.images, "new", recall(c), ""]),
  ];
  const report = make(
    "div",
    { class: "forgetting" },
    make("h3", {}, "What the update cost"),
    make("p", { class: "verdict" }, verdict),
    table(["class", "images", "before", "after", "change in points"], rows, [1, 2, 3, 4]),
    make("p", { class: "quiet" }, `In brackets: intervals of ${cost.interval}.`),
  );
  if (cost.confusions.length) {
    const taken = cost.confusions.map((c) => [c.class, c.taken_for, c.images]);
    report.append(make("details", {}, make("summary", {}, "What is taken for what"), table(["class", "taken for", "images"], taken, [2])));
  }
  const flipped = cost.flipped.map((f) => [f.file, f.class, f.before, f.after]);
  report.append(
    flipped.length
      ? make(
          "details",
          {},
          make("summary", {}, `Images whose prediction changed: ${flipped.length}`),
          table(["image", "class", "before", "after"], flipped),
        )
      : make("p", {}, "No image's prediction changed."),
  );
  return report;
}
