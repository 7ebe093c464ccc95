import { make, percent, versionSection } from "/report.js";

const MEANING = {
  uniform: "every class as frequent as any other",
  training: "as frequent as among the training images",
};
const SHOWN = 5; // classes of an image, until all are asked for
const shown = []; // {file, box}: what was dropped, in that order
const at = (id) => document.getElementById(id);
let model = null;

async function ask(address, form) {
  let answer, content;
  try {
    answer = await fetch(address, form ? { method: "POST", body: form } : {});
    content = await answer.json();
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function complain(error) {
  at("problem").textContent = error ? error.message : "";
  at("problem").hidden = !error;
}

async function describe() {
  model = await ask("/api/model");
  document.title = `${model.name}: medcil`;
  at("model-name").textContent = model.name;
  at("model-facts").textContent = `version ${model.version}, ${model.classes.length} classes`;
  at("notice").textContent = `${model.notice} No decision about a patient may rest on it.`;
  at("card-text").textContent = model.card ?? "This version has no model card.";
  const mib = (bytes) => `${+(bytes / 2 ** 20).toPrecision(3)} MiB`;
  at("limits").textContent = `up to ${mib(model.limits.file_bytes)} each; nothing is stored`;
  at("stale").textContent = `This page answers with version ${model.version}. The current one, ${model.current}, cannot be used: ${model.behind}`;
  at("stale").hidden = model.behind === null;
  const chosen = at("prior").value;
  at("prior").replaceChildren(...Object.keys(model.priors).map((name) => make("option", { value: name }, name)));
  if (chosen in model.priors) at("prior").value = chosen;
  const rate = model.unlike.false_alarms;
  const alarms =
    rate === null
      ? "Whether an image is unlike anything known was never measured for this model."
      : `“Unlike anything known” is said of up to ${percent(rate)} of images that are like those it was set on (${model.unlike.measured_on}).`;
  at("notes").replaceChildren(...[alarms, ...model.notes].map((note) => make("li", {}, note)));
  describePrior();
}

function describePrior() {
  const name = at("prior").value;
  at("prior-meaning").textContent = MEANING[name] ?? "as the file says that the server was started with";
}

function groups(entries) {
  // As many at once as the server takes.
  const found = [];
  let bytes = Infinity;
  for (const entry of entries) {
    const size = entry.file.size + 2048;
    if (bytes + size > model.limits.request_bytes || found.at(-1).length >= Math.min(8, model.limits.files)) {
      found.push([]);
      bytes = 0;
    }
    found.at(-1).push(entry);
    bytes += size;
  }
  return found;
}

async function predict(entries) {
  complain(null);
  const prior = at("prior").value;
  let done = 0;
  for (const group of groups(entries)) {
    at("progress").textContent = `${done} of ${entries.length} images done …`;
    const form = new FormData();
    form.append("prior", prior);
    const small = group.filter(({ file }) => file.size <= model.limits.file_bytes);
    for (const { file, box } of group) if (file.size > model.limits.file_bytes) showError(box, file, "It is too large.");
    for (const { file } of small) form.append("files", file, file.name);
    try {
      const answer = small.length ? await ask("/api/predict", form) : { rows: [], version: model.version };
      if (prior !== at("prior").value) return; // another was chosen meanwhile, and all are asked for again
      if (answer.version !== model.version) return await another(); // and again all are asked for
      answer.rows.forEach((row, i) => showRow(small[i], row));
    } catch (error) {
      complain(error);
      for (const { file, box } of small) showError(box, file, error.message);
    }
    done += group.length;
  }
  at("progress").textContent = `${done} ${done === 1 ? "image" : "images"} done.`;
}

async function another() {
  // Another version has become current: nothing that the last one said may stay beside what this one says.
  await describe();
  await predict(shown);
}

function thumbnail(file) {
  const picture = make("img", { class: "thumbnail", alt: "", src: URL.createObjectURL(file) });
  const release = () => URL.revokeObjectURL(picture.src);
  picture.addEventListener("load", release, { once: true });
  picture.addEventListener("error", () => {
    release();
    picture.replaceWith(make("div", { class: "thumbnail none" }, "no preview"));
  });
  return picture;
}

function showError(box, file, message) {
  box.replaceChildren(make("p", { class: "name" }, file.name), make("p", { class: "error" }, message));
}

function bars(classes) {
  const cells = classes.flatMap(({ name, probability }, index) => {
    const first = index === 0 ? "first " : "";
    const fill = make("div", { class: `${first}fill` });
    fill.style.width = `${100 * probability}%`;
    return [
      make("span", { class: `${first}class` }, name),
      make("div", { class: "track", "aria-hidden": "true" }, fill),
      make("span", { class: `${first}share` }, percent(probability)),
    ];
  });
  return make("div", { class: "bars" }, ...cells);
}

function showRow({ file, box }, row) {
  if (row.error !== null) {
    showError(box, file, row.error);
    return;
  }
  const actions = make("div", { class: "actions" });
  let drawn = bars(row.classes.slice(0, SHOWN));
  const answer = make(
    "div",
    {},
    make("p", { class: "name" }, row.file),
    make("h2", {}, row.predicted),
    row.is_unlike
      ? make("p", { class: "warning unlike" }, "Unlike anything known: do not rely on this answer.")
      : null,
    drawn,
    actions,
  );
  if (row.classes.length > SHOWN) {
    const all = make("button", { type: "button" }, `All ${row.classes.length} classes`);
    all.addEventListener("click", () => {
      drawn.replaceWith((drawn = bars(row.classes)));
      all.remove();
    });
    actions.append(all);
  }
  if (model.explains) {
    const why = make("button", { type: "button", class: "why" }, "Why this answer?");
    why.addEventListener("click", () => explain(why, file, box));
    actions.append(why);
  }
  box.replaceChildren(make("div", { class: "answer" }, thumbnail(file), answer));
}

async function explain(button, file, box) {
  button.disabled = true;
  button.textContent = "Looking …";
  const form = new FormData();
  form.append("files", file, file.name);
  let found;
  try {
    const content = await ask("/api/explain", form);
    if (content.version !== model.version) return await another();
    found = explanation(content);
  } catch (error) {
    found = make("p", { class: "error" }, error.message);
  }
  const place = make("div", { class: "explanation", tabIndex: -1 }, found);
  box.append(place);
  place.focus(); // where the button was, for those who go by keys
  button.remove();
}

function explanation(content) {
  const reasons = content.classes.map((of) =>
    make(
      "div",
      {},
      make("h3", {}, `${of.name}: ${percent(of.probability)}`),
      make(
        "div",
        { class: "stack" },
        make("img", { class: "under", src: content.seen, alt: "What the network saw" }),
        make("img", { src: of.saliency, alt: `Where in it ${of.name} comes from` }),
      ),
      make("p", { class: "quiet" }, of.nearest.length ? "Nearest exemplars" : "No exemplars are kept of this class."),
      make(
        "div",
        { class: "nearest" },
        ...of.nearest.map((near) =>
          make(
            "figure",
            {},
            make("img", { src: near.image, alt: `Exemplar of ${of.name}` }),
            make("figcaption", {}, near.cosine.toFixed(2)),
          ),
        ),
      ),
    ),
  );
  return make(
    "div",
    {},
    make("div", { class: "reasons" }, ...reasons),
    make(
      "p",
      { class: "quiet" },
      "Red: covering this place takes from the class; blue: it adds to it. This is what the network's answer depends " +
        "on, and no proof that it is right. " +
        (content.classes.some((of) => of.nearest.length)
          ? "Below the exemplars: the cosine to this image, 1 for the same direction. "
          : "") +
        "Probabilities here hold for classes that are all equally frequent.",
    ),
  );
}

function take(files) {
  const entries = [...files].map((file) => ({ file, box: make("article", { class: "result" }, file.name) }));
  if (!entries.length) return;
  at("results").prepend(...entries.map(({ box }) => box));
  shown.push(...entries);
  at("clear").hidden = false;
  predict(entries);
}

function choosing() {
  at("choose").addEventListener("change", (event) => {
    take(event.target.files);
    event.target.value = "";
  });
  at("prior").addEventListener("change", () => {
    describePrior();
    predict(shown);
  });
  at("clear").addEventListener("click", () => {
    shown.length = 0;
    at("results").replaceChildren();
    at("clear").hidden = true;
    at("progress").textContent = "";
    complain(null);
  });
  const over = (event) => at("drop").classList.toggle("over", event.type === "dragover");
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault(); // anywhere, or the browser would leave the page to show the image
      over(event);
      if (kind === "drop") take(event.dataTransfer.files);
    });
  }
}

async function showHistory() {
  let found;
  try {
    found = (await ask("/api/history")).versions.map(versionSection);
  } catch (error) {
    found = [make("p", { class: "error" }, error.message)];
  }
  at("history").replaceChildren(...found);
}

function tabs() {
  const all = [...document.querySelectorAll("[role=tab]")];
  const choose = (chosen) => {
    for (const tab of all) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      at(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
    if (chosen.id === "tab-history") showHistory();
  };
  all.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = all[(i + step + all.length) % all.length];
      next.focus();
      choose(next);
    });
  });
}

tabs();
describe().then(choosing).catch(complain);
