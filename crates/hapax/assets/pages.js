// Refreshes the marked regions of a visible page, and adds local times and copy buttons. Every page shows and
// does the same without this script.

const FAST = 2000;
const SLOW = 10000;

// The choice of UTC or local times, which a browser may refuse to remember.
const ZONE = "hapax-zone";
let isLocal = false;
try {
  isLocal = localStorage.getItem(ZONE) === "local";
} catch {}

const span = (seconds) => {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, name] = units.find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${name}`;
};

const age = (at) => {
  const seconds = (Date.now() - at.getTime()) / 1000;
  return seconds >= 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
};

// The local time in the same form as the UTC time of the server.
const local = (at, utc) => {
  const pad = (number, digits = 2) => String(number).padStart(digits, "0");
  const date = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} `;
  const clock = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  const millis = utc.includes(".") ? `.${pad(at.getMilliseconds(), 3)}` : "";
  return (utc.includes("-") ? date : "") + clock + millis;
};

const showTimes = () => {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    time.dataset.utc ??= time.textContent;
    const { utc } = time.dataset;
    const clock = isLocal ? local(at, utc) : utc;
    // Where space is short, the age takes the place of the time.
    const text = time.className === "ago" ? age(at) : clock;
    if (time.textContent !== text) time.textContent = text;
    time.dataset.age = age(at);
    time.title = `${time.className === "ago" ? `${clock}, ` : ""}${isLocal ? utc : `${local(at, utc)} local time`}, ${age(at)}`;
  }
};

const addZoneButton = () => {
  const button = document.createElement("button");
  const name = () => {
    button.textContent = isLocal ? "local" : "UTC";
    button.title = isLocal ? "Times are local. Show UTC" : "Times are UTC. Show local times";
  };
  button.type = "button";
  button.className = "quiet";
  button.addEventListener("click", () => {
    isLocal = !isLocal;
    try {
      localStorage.setItem(ZONE, isLocal ? "local" : "utc");
    } catch {}
    name();
    showTimes();
  });
  name();
  document.querySelector(".who")?.prepend(button);
};

// Names each cell by its column, so that a narrow screen can show each row as a card.
const addLabels = () => {
  for (const table of document.querySelectorAll("table:not(.cards)")) {
    const names = [...table.tHead?.rows[0]?.cells ?? []].map((name) => name.textContent);
    for (const row of table.tBodies[0]?.rows ?? []) {
      names.forEach((name, at) => row.cells[at]?.setAttribute("data-label", name));
    }
    table.classList.add("cards");
  }
};

const addCopyButtons = () => {
  for (const block of document.querySelectorAll("[data-copy]:not([data-copy-ready])")) {
    block.dataset.copyReady = "";
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", () => {
      // navigator.clipboard is missing on plain HTTP.
      const area = document.createElement("textarea");
      area.value = block.textContent;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.textContent = "Copied";
    });
    block.after(button);
  }
};

// Shows the figures of the bar under the pointer: a row of the table below the plots.
document.addEventListener("pointermove", ({ target, clientX }) => {
  const svg = target.closest?.(".plot svg");
  if (!svg) return;
  const { left, width } = svg.getBoundingClientRect();
  const x = (clientX - left) / width * svg.viewBox.baseVal.width;
  const row = [...document.querySelectorAll("tr[data-x]")].findLast((row) => row.dataset.x <= x);
  const names = row ? [...row.closest("table").tHead.rows[0].cells] : [];
  const text = names.map((name, at) => `${name.textContent}: ${row.cells[at].textContent}`).join("\n");
  let title = svg.querySelector("title");
  if (title === null) {
    title = document.createElementNS(svg.namespaceURI, "title");
    svg.prepend(title);
  }
  if (title.textContent !== text) title.textContent = text;
});

const isInUse = (region) => {
  const selection = document.getSelection();
  return region.contains(document.activeElement)
    || region.querySelector("details[open]") !== null
    || (selection !== null && !selection.isCollapsed && selection.containsNode(region, true));
};

let etag = null;
// The HTML of each region as the server sent it, without what this script added.
const served = new Map();

const refresh = async () => {
  const headers = etag === null ? {} : { "if-none-match": etag };
  const answer = await fetch(location.href, { headers, redirect: "error" });
  if (answer.status === 304) return false;
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  etag = answer.headers.get("etag");
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  let changed = false;
  for (const region of document.querySelectorAll("[data-live]")) {
    const next = fresh.getElementById(region.id);
    if (next === null || next.innerHTML === served.get(region.id) || isInUse(region)) continue;
    served.set(region.id, next.innerHTML);
    region.replaceChildren(...next.childNodes);
    changed = true;
  }
  if (changed) decorate();
  return changed;
};

// Says that the page is no longer updated, and since when.
let refreshed = new Date();
let stale = null;
const sayStale = (isStale) => {
  if (!isStale) {
    refreshed = new Date();
    stale?.remove();
    stale = null;
  } else if (stale === null) {
    stale = document.createElement("p");
    stale.className = "stale";
    stale.setAttribute("role", "status");
    const at = refreshed.toISOString();
    stale.append("This page is not updated any more: the server does not answer, or the session has ended. It shows the state of ");
    const time = document.createElement("time");
    time.dateTime = at;
    time.textContent = `${at.slice(0, 19).replace("T", " ")}Z`;
    stale.append(time, ".");
    document.body.append(stale);
    showTimes();
  }
};

const decorate = () => {
  showTimes();
  addLabels();
  addCopyButtons();
};

const watch = async () => {
  let wait = FAST;
  let wake = () => {};
  // A page that becomes visible again shows the current state at once.
  document.addEventListener("visibilitychange", () => wake());
  for (;;) {
    await new Promise((resume) => {
      wake = resume;
      setTimeout(resume, wait);
    });
    if (document.visibilityState !== "visible") continue;
    try {
      wait = await refresh() ? FAST : Math.min(wait * 1.5, SLOW);
      sayStale(false);
    } catch {
      wait = SLOW;
      sayStale(true);
    }
  }
};

for (const region of document.querySelectorAll("[data-live]")) served.set(region.id, region.innerHTML);
decorate();
addZoneButton();
setInterval(showTimes, SLOW);
if (document.querySelector("main [data-live]") !== null) watch();
