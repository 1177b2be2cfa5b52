// The page: what it shows, and what it asks of the library. No request leaves it once it is loaded.

const $ = (id) => document.getElementById(id);
const { draw, time_ms, lint, options_help, options_problem, initSync } = wasm_bindgen;

const load = async (name) => {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer;
};
const [module, glue, work, exampleLog, examplePolicy] = await Promise.all([
  load("playground_bg.wasm").then((answer) => answer.arrayBuffer()).then(WebAssembly.compile),
  load("playground.js").then((answer) => answer.text()),
  load("worker.js").then((answer) => answer.text()),
  load("access.log").then((answer) => answer.blob()),
  load("policy.toml").then((answer) => answer.text()),
]).catch((error) => {
  $("scene-error").textContent = `The playground cannot be loaded: ${error.message}`;
  throw error;
});
initSync({ module });
const workerUrl = URL.createObjectURL(new Blob([glue, work], { type: "text/javascript" }));

// --- algorithms ----------------------------------------------------------------------------------

const NAMES = ["gcra", "fixed-window", "first-request-window", "sliding-counter", "bucketed-window", "sliding-log", "concurrency"];
const SHOWN = ["gcra", "fixed-window", "sliding-log"];
const scene = $("scene");
const drawing = $("drawing").attachShadow({ mode: "open" });
const wide = matchMedia("(min-width: 640px)");
let [seed, added] = [1, []];

for (const name of NAMES) {
  const [label, box] = ["label", "input"].map((tag) => document.createElement(tag));
  Object.assign(box, { type: "checkbox", name: "algorithm", value: name, checked: SHOWN.includes(name) });
  label.append(box, ` ${name}`);
  $("names").append(label);
}

function redraw() {
  const { rate, burst, pattern } = Object.fromEntries(new FormData(scene));
  scene.elements["rate-shown"].value = rate;
  scene.elements["burst-shown"].value = burst;
  $("again").hidden = pattern !== "random";
  const settings = {
    rate: Number(rate), burst: Number(burst), pattern, seed, added_ms: added, is_wide: wide.matches,
    algorithms: new FormData(scene).getAll("algorithm"),
  };
  try {
    // A text of ours: the library escapes what it puts in.
    drawing.innerHTML = draw(JSON.stringify(settings));
    $("scene-error").textContent = "";
  } catch (error) {
    $("scene-error").textContent = error;
  }
}

function add(at_ms) {
  added.push(Math.round(at_ms));
  redraw();
}

scene.addEventListener("input", redraw);
scene.addEventListener("submit", (event) => event.preventDefault());
wide.addEventListener("change", redraw);
$("add").onclick = () => $("at").reportValidity() && $("at").value && add($("at").valueAsNumber * 1000);
$("clear").onclick = () => { added = []; redraw(); };
$("again").onclick = () => { seed += 1; redraw(); };
$("drawing").onclick = ({ clientX }) => {
  const svg = drawing.querySelector("svg");
  const { left, width } = svg.getBoundingClientRect();
  const at_ms = time_ms(wide.matches, (clientX - left) * svg.viewBox.baseVal.width / width);
  if (at_ms !== undefined) add(at_ms);
};

// --- policies ------------------------------------------------------------------------------------

// What stands in a line before a column, which counts characters.
const before_column = (line, column) => [...line].slice(0, column - 1).join("");

// Marks the mistakes in an editor, and lists them. Returns whether there are none.
function check(editor) {
  const text = editor.value;
  const told = lint(text).trim().split("\n").map((line) => JSON.parse(line));
  told.pop(); // the totals
  const marks = new Map(told.filter(({ line }) => line).map((problem) => [problem.line, problem]));
  const lines = text.split("\n").flatMap((line, place) => {
    const problem = marks.get(place + 1);
    if (!problem) return [line, "\n"];
    const mark = document.createElement("mark");
    const before = before_column(line, problem.column);
    mark.textContent = line.slice(before.length) || " ";
    mark.className = problem.note ? "note" : "";
    return [before, mark, "\n"];
  });
  editor.previousElementSibling.replaceChildren(...lines);
  $(`${editor.id}-problems`).replaceChildren(...told.map(({ line, column, message, note }) => {
    const [item, button] = ["li", "button"].map((tag) => document.createElement(tag));
    button.type = "button";
    button.textContent = `${line ? `line ${line}, column ${column}: ` : ""}${note ? "note: " : ""}${message}`;
    button.onclick = () => {
      const lines = text.split("\n").slice(0, line ?? 1);
      lines.push(before_column(lines.pop(), column ?? 1));
      const place = lines.join("\n").length;
      editor.focus();
      editor.setSelectionRange(place, place);
    };
    item.className = note ? "note" : "";
    item.append(button);
    return item;
  }));
  const isRight = told.every(({ note }) => note);
  editor.setAttribute("aria-invalid", String(!isRight));
  return isRight;
}

const policy = $("policy"), other = $("other"), comparison = $("comparison"), options = $("options");
const compares = () => comparison.open && other.value.trim() !== "";

function check_options() {
  const problem = options_problem(options.value);
  $("options-problem").textContent = problem ?? "";
  options.setAttribute("aria-invalid", String(problem !== undefined));
  return problem === undefined;
}

// Marks all mistakes. Returns whether there are none.
const areRight = () => [check_options(), ...[policy, ...(compares() ? [other] : [])].map(check)].every(Boolean);

for (const editor of [policy, other]) {
  editor.addEventListener("scroll", () => {
    editor.previousElementSibling.style.translate = `${-editor.scrollLeft}px ${-editor.scrollTop}px`;
  });
  editor.addEventListener("input", () => { check(editor); later(); });
}
options.addEventListener("input", () => { check_options(); later(); });
comparison.addEventListener("toggle", () => {
  if (comparison.open && other.value === "") other.value = policy.value;
  check(other);
  later();
});

// --- links ---------------------------------------------------------------------------------------

const packed = (text) => {
  const bytes = Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte));
  return btoa(bytes.join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
};
const unpacked = (text) => {
  const bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes, (byte) => byte.charCodeAt(0)));
};

// What a link holds, and how it is named if it is damaged.
const PARTS = { policy: "policy", other: "second policy", options: "options" };
// Tells a text that was cut off or changed on its way; 0 of none.
const checksum = (text) => Array.from(text).reduce((sum, char) => Math.imul(sum, 31) + char.codePointAt(0) >>> 0, 0).toString(36);

$("share").onclick = () => {
  const texts = [policy.value, compares() ? other.value : "", options.value.trim()];
  // First, as the end may be cut off.
  const parts = new URLSearchParams({ check: texts.map(checksum).join(".") });
  Object.keys(PARTS).forEach((name, place) => {
    if (texts[place]) parts.set(name, name === "options" ? texts[place] : packed(texts[place]));
  });
  history.replaceState(null, "", `#${parts}`);
  $("link-problem").textContent = "";
  $("shared").hidden = false;
  $("link").value = location.href;
  $("link").select();
  navigator.clipboard?.writeText(location.href).catch(() => {}); // the link is selected, too
};

// Takes the policies and the options of the address, if it has some, and tells which are damaged.
function open_link() {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!parts.has("check") && !parts.has("policy")) return;
  $("log").scrollIntoView();
  const sums = parts.get("check")?.split(".") ?? [];
  const damaged = [];
  const [shared, second, how] = Object.entries(PARTS).map(([name, named], place) => {
    try {
      const text = name === "options" ? parts.get(name) ?? "" : unpacked(parts.get(name) ?? "");
      if (checksum(text) === sums[place]) return text;
    } catch {} // no base64, or no UTF-8
    damaged.push(`its ${named}`);
    return "";
  });
  if (shared) policy.value = shared;
  [other.value, options.value] = [second, how];
  comparison.open = second !== "";
  $("link-problem").textContent = damaged.length > 0 ? `The link is damaged: ${new Intl.ListFormat("en").format(damaged)} cannot be read.` : "";
  areRight();
  later();
}
addEventListener("hashchange", open_link);

// --- the replay ----------------------------------------------------------------------------------

let files = [], worker = null, timer = 0;

const report = $("report");

function tell(text, isWrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", isWrong);
}

function stop() {
  clearTimeout(timer);
  worker?.terminate();
  worker = null;
  $("running").hidden = true;
}

// Tells what came of it in the place of a report.
function fail(text, isWrong = true) {
  tell(text, isWrong);
  for (const id of ["report", "save", "said"]) $(id).hidden = true;
}

// Begins anew when the user has paused. The report is of what was there before.
function later() {
  stop();
  $("shared").hidden = true;
  report.classList.add("old");
  timer = setTimeout(run, 400);
}

function run() {
  stop();
  if (files.length === 0) return;
  if (!areRight()) return tell("Mend what is marked to see what the policy would have done.", true);
  const request = {
    policy: policy.value, other: compares() ? other.value : null,
    files: files.map(({ name }) => name), options: options.value,
  };
  $("progress").value = 0;
  $("running").hidden = false;
  tell("Replaying …");
  worker = new Worker(workerUrl);
  worker.postMessage({ module, request, files });
  worker.onmessage = ({ data }) => {
    if (data.read !== undefined) {
      $("progress").value = data.read;
      return;
    }
    stop();
    if (data.failed) fail(data.failed); else show(data.told);
  };
  worker.onerror = ({ message }) => {
    stop();
    fail(`The replay has stopped: ${message}. The log may be too large for this browser.`);
  };
}

// As high as what it shows, which `scrollHeight` tells only of what is higher than the frame.
const fit = () => {
  const { height } = report.contentDocument.documentElement.getBoundingClientRect();
  report.style.height = `${Math.ceil(height)}px`;
};
addEventListener("resize", fit);
report.onload = () => {
  // A bar to scroll with would take width while the frame grows, and so make lines wrap.
  report.contentDocument.documentElement.style.overflow = "hidden";
  fit();
  report.contentDocument.addEventListener("toggle", fit, true); // lines that fold out
  takes_drops(report.contentWindow);
};

function show({ page, said, error }) {
  const log = files.length === 1 ? files[0].name : `${files.length} logs`;
  if (error === null) tell(`Done: the report of ${log} stands below.`); else fail(error);
  if (page !== null) present(page);
  $("said").hidden = said.length === 0;
  $("said").lastElementChild.replaceChildren(...said.map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
}

function present(page) {
  report.hidden = false;
  report.classList.remove("old");
  report.srcdoc = page;
  URL.revokeObjectURL($("save").href);
  $("save").href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  $("save").hidden = false;
}

// The field names the logs of the report, however they came.
function name_files() {
  const chosen = new DataTransfer();
  for (const file of files) chosen.items.add(file);
  $("files").files = chosen.files;
}

function take(list) {
  if (list.length === 0) return;
  files = Array.from(list);
  name_files();
  fail("", false);
  run();
}

$("files").onclick = () => { $("files").value = ""; }; // the same file may be chosen again, when it has changed
$("files").oncancel = name_files;
$("files").onchange = () => take($("files").files);
$("example").onclick = () => take([new File([exampleLog], "access.log")]);
$("cancel").onclick = () => {
  stop();
  fail("Cancelled.", false);
  $("files").focus();
};

// Anywhere: a browser leaves the page for a file that misses its place.
function takes_drops(target) {
  for (const name of ["dragover", "dragleave", "drop"]) {
    target.addEventListener(name, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files);
    });
  }
}

takes_drops(window);
$("options-help").textContent = options_help();
redraw();
policy.value = examplePolicy;
areRight();
open_link();
document.documentElement.dataset.ready = "";
